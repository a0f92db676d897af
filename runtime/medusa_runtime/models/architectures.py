"""The supported architectures, as config.json names them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from medusa_runtime.errors import ModelError, short_repr

# Yi's checkpoints are named LlamaForCausalLM, and Falcon's first ones RWForCausalLM.
ARCHITECTURES: dict[str, str] = {
    "LlamaForCausalLM": "llama:Llama",
    "MistralForCausalLM": "llama:Llama",
    "YiForCausalLM": "llama:Llama",
    "Qwen2ForCausalLM": "llama:Llama",
    "Qwen3ForCausalLM": "llama:Llama",
    "MixtralForCausalLM": "mixture:Mixture",
    "Qwen2MoeForCausalLM": "mixture:Mixture",
    "Qwen3MoeForCausalLM": "mixture:Mixture",
    "Gemma3ForCausalLM": "gemma3:Gemma3",
    "GptOssForCausalLM": "gpt_oss:GptOss",
    "Lfm2ForCausalLM": "lfm2:Lfm2",
    "Lfm2MoeForCausalLM": "lfm2:Lfm2Moe",
    "Qwen3NextForCausalLM": "qwen3_next:Qwen3NextMoe",
    "Qwen3_5ForCausalLM": "qwen3_next:Qwen3Next",
    "Qwen3_5MoeForCausalLM": "qwen3_next:Qwen3NextMoe",
    "OPTForCausalLM": "opt:OPT",
    "FalconForCausalLM": "falcon:Falcon",
    "RWForCausalLM": "falcon:Falcon",
}

# The model_type of encoders, which turn text into vectors; models/bert.py runs them.
ENCODERS = ("bert", "roberta", "xlm-roberta", "camembert")
CLASSIFIER = "ForSequenceClassification"  # the end of the names of transformers' text classifiers
_BARE = re.compile(r"(?:Text)?Model$")
_OWN_CLASSIFIERS = ("opt:", "falcon:")  # families whose classifiers transformers runs with code of their own
_OTHER_TASKS = ("ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice")  # which only a handler runs


def is_encoder(raw: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes one of ENCODERS, and not a decoder or an encoder with another task.

    With ``is_decoder``, tokens of these models see earlier ones only, which transformers' code computes.
    """
    other = any(name in ARCHITECTURES or name.endswith((CLASSIFIER, *_OTHER_TASKS)) for name in _named(raw))
    return raw.get("model_type") in ENCODERS and not other and not raw.get("is_decoder")


def as_decoder(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a config.json as the one of a whole decoder of ours; None if it is of no such decoder.

    Some embedding models were saved without their head, and so are called MistralModel instead of MistralForCausalLM,
    or Gemma3TextModel.
    """
    whole = dict(raw) | {"architectures": [_BARE.sub("ForCausalLM", name) for name in _named(raw)]}
    return whole if whole["architectures"] and has_family(whole) else None


def classifying_decoder(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the config.json of the decoder whose last hidden state a sequence classifier looks at; None for another.

    Such a model is called Qwen3ForSequenceClassification, and is a Qwen3ForCausalLM with another head.
    """
    names = _named(raw)
    if not names or not names[0].endswith(CLASSIFIER):
        return None
    whole = dict(raw) | {"architectures": [names[0].removesuffix(CLASSIFIER) + "ForCausalLM"]}
    if not has_family(whole) or ARCHITECTURES[architecture_of(whole)].startswith(_OWN_CLASSIFIERS):
        return None
    return whole


def _named(raw: Mapping[str, Any]) -> list[str]:
    named = raw.get("architectures")
    return [name for name in named if isinstance(name, str)] if isinstance(named, list) else []


def has_family(raw: Mapping[str, Any]) -> bool:
    """Return whether one of our families runs the decoder of a config.json. transformers may run the others."""
    # Falcon's first small models have ALiBi, which our Falcon lacks.
    return architecture_of(raw) in ARCHITECTURES and not (raw.get("model_type") == "falcon" and raw.get("alibi"))


def architecture_of(raw: Mapping[str, Any]) -> str:
    """Return the first of a config.json's ``architectures`` that we know, or else the first. Raises ModelError."""
    named = raw.get("architectures")
    if not isinstance(named, list) or not named or not all(isinstance(name, str) for name in named):
        own_module = "none; for a handler that builds its module itself say --engine none"
        raise ModelError(
            f"config.json: expected architectures to be a list of names such as [{next(iter(ARCHITECTURES))!r}], "
            f"found {own_module if named is None else short_repr(named)}"
        )
    return str(next((name for name in named if name in ARCHITECTURES), named[0]))


def unsupported(architecture: str, reason: str = "transformers has no such class") -> ModelError:
    """Return the error for an architecture that the torch engine does not run."""
    from difflib import get_close_matches  # 5 ms, and only an error needs it

    near = get_close_matches(architecture[:100], ARCHITECTURES, n=1, cutoff=0.9)
    if near and _digits(near[0]) != _digits(architecture):  # Qwen9 is another model, not a misspelled Qwen3
        near = []
    meant = f" (did you mean {near[0]}?)" if near else ""
    return ModelError(
        f"the torch engine does not know the architecture {architecture[:100]}{meant}, and {reason}; expected one of "
        f"{', '.join(ARCHITECTURES)}, one that transformers knows, or --engine vllm"
    )


def _digits(name: str) -> str:
    return "".join(filter(str.isdigit, name))
