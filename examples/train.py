"""Train the example model: a 3-million-parameter Llama on the prose of Python's own documentation.

``python examples/train.py --out examples/pydoc-lm --minutes 25`` on one CPU thread. Needs torch, transformers and
tokenizers. The checkpoint is written every few minutes, so an interrupted run leaves a working model.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from corpus import documents
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 2048
CONTEXT = 512
BATCH = 2
LEARNING_RATE = 2e-3
SAVE_EVERY_S = 240.0
END, USER, ASSISTANT = "<|end|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ 'assistant' if message['role'] == 'assistant' else 'user' }}|>"
    "{{ message['content'] }}{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "pydoc-lm")
    parser.add_argument("--minutes", type=float, default=25.0, help="how long to train, evaluation and saving included")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    options.out.mkdir(parents=True, exist_ok=True)

    texts = documents()
    tokenizer = train_tokenizer(texts)
    save_tokenizer(tokenizer, options.out)
    held_out, training = texts[::50], [text for number, text in enumerate(texts) if number % 50]
    model = LlamaForCausalLM(model_config())
    print(f"{len(texts)} documents, {sum(p.numel() for p in model.parameters())} parameters", flush=True)
    train(model, tokenizer, training, held_out, options)


def model_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
    )


def train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def train(
    model: LlamaForCausalLM,
    tokenizer: Tokenizer,
    training: list[str],
    held_out: list[str],
    options: argparse.Namespace,
) -> None:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), lr=0.0)
    tests = batches(token_stream(tokenizer, held_out))
    began = saved = time.monotonic()
    step = epoch = 0
    while True:
        for batch in batches(token_stream(tokenizer, training)):
            done = (time.monotonic() - began) / (60 * options.minutes)
            if done >= 1.0:
                save(model, options.out)
                print(f"step {step} epoch {epoch} held-out loss {evaluate(model, tests):.3f}", flush=True)
                return
            for group in optimizer.param_groups:  # warm up, then decrease to almost nothing at the end
                group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 100, 1.06 - done)
            loss = model(input_ids=batch, labels=batch).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            if step % 50 == 0:
                seconds = time.monotonic() - began
                print(f"{seconds:.0f} s step {step} epoch {epoch} loss {loss.item():.3f}", flush=True)
            if time.monotonic() - saved > SAVE_EVERY_S:
                saved = time.monotonic()
                save(model, options.out)
                print(f"saved; held-out loss {evaluate(model, tests):.3f}", flush=True)
        epoch += 1


def token_stream(tokenizer: Tokenizer, texts: list[str]) -> torch.Tensor:
    """Return the tokens of all documents in a new random order, one after another, each after an END: [tokens]."""
    order = torch.randperm(len(texts)).tolist()
    encodings = tokenizer.encode_batch([END + texts[number] for number in order])
    return torch.tensor([token for encoding in encodings for token in encoding.ids])


def batches(stream: torch.Tensor) -> torch.Tensor:
    """Divide a stream of tokens into [batches, BATCH, CONTEXT]."""
    whole = len(stream) // (BATCH * CONTEXT)
    return stream[: whole * BATCH * CONTEXT].view(whole, BATCH, CONTEXT)


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, tests: torch.Tensor) -> float:
    model.eval()
    losses = [model(input_ids=batch, labels=batch).loss.item() for batch in tests]
    model.train()
    return sum(losses) / len(losses)


def save_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "add_bos_token": False,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def save(model: LlamaForCausalLM, out: Path) -> None:
    """Save the model in bf16, through a temporary folder, so that a reader never sees half a file."""
    copy = LlamaForCausalLM(model.config).to(torch.bfloat16)
    copy.load_state_dict(model.state_dict())
    copy.config.dtype = torch.bfloat16
    part = out / ".part"
    copy.save_pretrained(part)
    for file in part.iterdir():
        file.replace(out / file.name)
    part.rmdir()


if __name__ == "__main__":
    main()
