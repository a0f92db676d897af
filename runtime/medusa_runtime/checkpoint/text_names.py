"""The names of the tensors of a decoder inside a model that also takes pictures or sound."""

from __future__ import annotations

import re

_TEXT = re.compile(r"(?:model\.)?language_model\.(?:(model|lm_head)\.)?")
# Beside pictures and sound: heads that guess further tokens (Qwen3.5).
_OTHER = re.compile(
    r"(?:model\.)?(?:visual|vision_tower|vision_model|multi_modal_projector|audio_tower|image_newline|mtp)(?:\.|$)"
)


def text_name(name: str) -> str | None:
    """Return the decoder's name for a tensor of the whole model; None for one that no text needs.

    A decoder's own names stay as they are.
    """
    if (found := _TEXT.match(name)) is not None:
        return f"{found[1] or 'model'}.{name[found.end() :]}"
    return None if _OTHER.match(name) else name
