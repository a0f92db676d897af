"""The system `transformers`: a server that streams OpenAI completions, one request at a time.

Arguments: model folder, port. Prompts are lists of token ids.
"""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, port = sys.argv[1], int(sys.argv[2])
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
one_at_a_time = threading.Lock()


class Completions(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        with one_at_a_time, torch.inference_mode():
            tokens, cache = torch.tensor([asked["prompt"]]), None
            for _ in range(asked["max_tokens"]):
                found = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
                tokens, cache = found.logits[:, -1:].argmax(-1), found.past_key_values
                event = {"choices": [{"text": tokenizer.decode(tokens[0])}]}
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *args: object) -> None:
        pass


ThreadingHTTPServer(("127.0.0.1", port), Completions).serve_forever()
