"""Small models of transformers of many tasks, and what each of them computes.

As a program, it computes the same with the modules that `context.weights.pretrained_model` makes, from the folders
below the one that is given, in a process that imports torch and transformers leanly.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

TEXT = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
        "max_position_embeddings": 40}  # fmt: skip
PICTURE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
           "image_size": 32, "patch_size": 8}  # fmt: skip
BOTH = {"vocab_size": 60, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
        "max_position_embeddings": 40, "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 2, "forced_eos_token_id": None}  # fmt: skip
SOUND = {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 40, "suppress_tokens": None,
         "begin_suppress_tokens": None}  # fmt: skip
WAVE = {"conv_dim": [8, 8], "conv_kernel": [3, 3], "conv_stride": [2, 2], "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}  # fmt: skip
T5 = {"vocab_size": 60, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
      "decoder_start_token_id": 0}  # fmt: skip
DISTILLED = {"vocab_size": 60, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}

CASES: dict[str, dict[str, Any]] = {
    "BertForTokenClassification": TEXT | {"num_labels": 5},
    "BertForMaskedLM": TEXT,
    "DistilBertForQuestionAnswering": DISTILLED,
    "BartForSequenceClassification": BOTH | {"num_labels": 3},
    "ViTForImageClassification": PICTURE | {"num_labels": 4},
    "ResNetForImageClassification": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
    "CLIPModel": {"text_config": TEXT | {"eos_token_id": 2}, "vision_config": PICTURE, "projection_dim": 16},
    "T5ForConditionalGeneration": T5,
    "MarianMTModel": BOTH,
    "BartForConditionalGeneration": BOTH,
    "WhisperForConditionalGeneration": BOTH | SOUND,
    "Wav2Vec2ForCTC": TEXT | WAVE,
    "DetrForObjectDetection": {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
                               "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
                               "num_queries": 4, "use_timm_backbone": False, "backbone": None},
}  # fmt: skip
WHOLE = ("Wav2Vec2ForCTC", "DetrForObjectDetection")  # need more of torch or transformers than others, and come last


def computed(name: str, model: Any) -> Any:
    """What a model of this class computes for a fixed input: a tensor."""
    import torch

    ids, picture = torch.arange(4, 14)[None], torch.linspace(-1, 1, 3 * 32 * 32).reshape(1, 3, 32, 32)
    beams = {"max_new_tokens": 6, "do_sample": False, "num_beams": 2}
    with torch.inference_mode():
        if name.startswith("Whisper"):
            return model.generate(torch.linspace(-1, 1, 8 * 32).reshape(1, 8, 32), max_new_tokens=6, do_sample=False)
        if name.endswith(("ConditionalGeneration", "MTModel")):
            return model.generate(ids, **beams)
        if name == "CLIPModel":
            return model(input_ids=ids, pixel_values=picture).logits_per_image
        if name.startswith("Wav2Vec2"):
            return model(torch.linspace(-1, 1, 400)[None]).logits
        if name.endswith(("ImageClassification", "ObjectDetection")):
            return model(pixel_values=picture).logits
        if name.endswith("QuestionAnswering"):
            return model(ids).start_logits
        if name.startswith("Bart"):
            ids[0, -1] = 2  # the end of the text, whose state is classified
        return model(ids).logits


def weights(folder: Path) -> Any:
    """`context.weights` for the checkpoint in a folder."""
    from fetching import fetch_into
    from medusa_handler.user_code.weights import Weights
    from medusa_runtime.config import Settings
    from medusa_runtime.region.reader import Region
    from medusa_runtime.timeline import Timeline

    region = Region.create()
    fetch_into(region, str(folder))
    return Weights(region, Settings(), Timeline.create("engine"))


def main(root: Path) -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stdout)
    from medusa_runtime.imports.lazy_torch import import_torch

    import_torch()
    from safetensors.torch import save_file

    for name in CASES:
        if name == WHOLE[0]:
            print("so far", type(sys.modules["transformers"]).__name__, flush=True)
        found = weights(root / name)
        save_file({"computed": computed(name, found.pretrained_model()).contiguous()}, root / f"{name}.safetensors")
        found.close()
    from transformers import AutoConfig

    print("configuration", type(AutoConfig.from_pretrained(root / "CLIPModel")).__name__)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
