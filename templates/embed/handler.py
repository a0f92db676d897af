"""Sentence embeddings by all-MiniLM-L6-v2: {"input": "…" or […]} in, vectors of length 1 out."""

import json

from medusa_handler import HttpError

MOST_TEXTS = 256
MOST_TOKENS = 256  # as the model was trained


class Handler:
    def load(self, context):
        from medusa_runtime.models.bert import Bert, BertConfig
        from tokenizers import Tokenizer

        files = context.weights.file
        config = BertConfig.from_hf(json.loads(files("config.json")), pooler=False)
        # Built without waiting for the weights: the first request waits, layer by layer, for what is not there yet.
        self.model = context.weights.build(lambda: Bert(config))
        self.tokenizer = Tokenizer.from_str(files("tokenizer.json").decode())
        self.tokenizer.enable_truncation(MOST_TOKENS)
        self.tokenizer.enable_padding()

    def predict(self, request):
        given = request.json.get("input")
        texts = [given] if isinstance(given, str) else given
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise HttpError(400, 'expected {"input": "text"} or {"input": ["text", …]}')
        if len(texts) > MOST_TEXTS:
            raise HttpError(413, f"expected at most {MOST_TEXTS} texts, found {len(texts)}")
        return {"embeddings": self.embed(texts), "model": "all-MiniLM-L6-v2"}

    def embed(self, texts):
        import torch
        from medusa_runtime.models.pooling import mean, unit

        encoded = self.tokenizer.encode_batch(texts)
        token_ids = torch.tensor([text.ids for text in encoded])
        mask = torch.tensor([text.attention_mask for text in encoded]).bool()
        with torch.inference_mode():
            return unit(mean(self.model(token_ids, mask), mask)).tolist()
