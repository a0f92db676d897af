"""How texts are split for each pre-tokenizer that llama.cpp knows: as llama.cpp's own code splits them.

The lines were made with llama.cpp's ``unicode.cpp``, and are the same as those of the regular expressions here. For
those of ``BY_CASE``, the last text shows the original's split: llama.cpp only approximates their regular expressions,
and takes a mark from its letter.
"""

from __future__ import annotations

import json

import pytest
from medusa_runtime.checkpoint.gguf.pretokenizers import PRE_TOKENIZERS
from tokenizers import Tokenizer

TEXTS = (
    "I'm SURE they'LL pay $1234567.89, don't  we?\r\n\n  go",
    'x1\n\t y//z <b>"q" ...\n\n你好，世界 Grüße 12\n  ',
    "[a] HTMLParse x_y (1+2)=3; '5'Dx      z न्य",
)
BY_CASE = "gpt-4o llama4 kanana2 talkie minimax-m2 tekken kimi-k2"
SPLITS = {  # with a bar between two words
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano dbrx smaug-bpe "
    "chatglm-bpe glm4 glm5 minicpm5": (
        "I¦'m¦ SURE¦ they¦'LL¦ pay¦ $¦123¦456¦7¦.¦89¦,¦ don¦'t¦ ¦ we¦?\r\n\n¦ ¦ go",
        'x¦1¦\n¦\t¦ y¦//¦z¦ <¦b¦>"¦q¦"¦ ...\n\n¦你好¦，世界¦ Grüße¦ ¦12¦\n¦  ',
        "[a¦]¦ HTMLParse¦ x¦_y¦ (¦1¦+¦2¦)=¦3¦;¦ '¦5¦'D¦x¦     ¦ z¦ न¦्य",
    ),
    "gpt-2 phi-2 jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code roberta-bpe gigachat "
    "a.x-4.0 mellum exaone4 jais trillion granite-docling mpt olmo modern-bert": (
        "I¦'m¦ SURE¦ they¦'¦LL¦ pay¦ $¦1234567¦.¦89¦,¦ don¦'t¦ ¦ we¦?¦\r\n\n ¦ go",
        'x¦1¦\n\t¦ y¦//¦z¦ <¦b¦>"¦q¦"¦ ...¦\n¦\n¦你好¦，¦世界¦ Grüße¦ 12¦\n  ',
        "[¦a¦]¦ HTMLParse¦ x¦_¦y¦ (¦1¦+¦2¦)=¦3¦;¦ '¦5¦'¦Dx¦     ¦ z¦ न¦्¦य",
    ),
    "starcoder refact smollm codeshell exaone minerva-7b mellum2 command-r": (
        "I¦'m¦ SURE¦ they¦'¦LL¦ pay¦ $¦1¦2¦3¦4¦5¦6¦7¦.¦8¦9¦,¦ don¦'t¦ ¦ we¦?¦\r\n\n ¦ go",
        'x¦1¦\n\t¦ y¦//¦z¦ <¦b¦>"¦q¦"¦ ...¦\n¦\n¦你好¦，¦世界¦ Grüße¦ ¦1¦2¦\n  ',
        "[¦a¦]¦ HTMLParse¦ x¦_¦y¦ (¦1¦+¦2¦)=¦3¦;¦ '¦5¦'¦Dx¦     ¦ z¦ न¦्¦य",
    ),
    "qwen2 stablelm2 deepseek-r1-qwen kormo f2llmv2 megrez hunyuan solar-open grok-2 bailingmoe "
    "bailingmoe2 llada-moe": (
        "I¦'m¦ SURE¦ they¦'LL¦ pay¦ $¦1¦2¦3¦4¦5¦6¦7¦.¦8¦9¦,¦ don¦'t¦ ¦ we¦?\r\n\n¦ ¦ go",
        'x¦1¦\n¦\t¦ y¦//¦z¦ <¦b¦>"¦q¦"¦ ...\n\n¦你好¦，世界¦ Grüße¦ ¦1¦2¦\n¦  ',
        "[a¦]¦ HTMLParse¦ x¦_y¦ (¦1¦+¦2¦)=¦3¦;¦ '¦5¦'D¦x¦     ¦ z¦ न¦्य",
    ),
    "qwen35": (
        "I¦'m¦ SURE¦ they¦'LL¦ pay¦ $¦1¦2¦3¦4¦5¦6¦7¦.¦8¦9¦,¦ don¦'t¦ ¦ we¦?\r\n\n¦ ¦ go",
        'x¦1¦\n¦\t¦ y¦//¦z¦ <¦b¦>"¦q¦"¦ ...\n\n¦你好¦，世界¦ Grüße¦ ¦1¦2¦\n¦  ',
        "[a¦]¦ HTMLParse¦ x¦_y¦ (¦1¦+¦2¦)=¦3¦;¦ '¦5¦'D¦x¦     ¦ z¦ न्य",
    ),
    "deepseek-llm": (
        "I¦'¦m¦ SURE¦ they¦'¦LL¦ pay¦ $¦1234567¦.¦89¦,¦ don¦'¦t¦ ¦ we¦?¦\r¦\n¦\n¦ ¦ go",
        'x¦1¦\n¦\t¦ y¦//¦z¦ <¦b¦>"¦q¦"¦ ...¦\n¦\n¦你好¦，¦世界¦ Gr¦üß¦e¦ ¦12¦\n¦  ',
        "[¦a¦]¦ HTMLParse¦ x¦_¦y¦ (¦1¦+¦2¦)=¦3¦;¦ '¦5¦'¦Dx¦     ¦ z¦ ¦न्य",
    ),
    "deepseek-coder": (
        "I¦'¦m¦ SURE¦ they¦'¦LL¦ pay¦ $¦1¦2¦3¦4¦5¦6¦7¦.¦8¦9¦,¦ don¦'¦t¦ ¦ we¦?¦\r¦\n¦\n¦ ¦ go",
        'x¦1¦\n¦\t¦ y¦//¦z¦ <¦b¦>¦"¦q¦"¦ ...¦\n¦\n¦你好¦，¦世界¦ Grüße¦ ¦1¦2¦\n¦  ',
        "[¦a¦]¦ HTMLParse¦ x¦_¦y¦ (¦1¦+¦2¦)¦=¦3¦;¦ '¦5¦'¦Dx¦     ¦ z¦ ¦न¦्¦य",
    ),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": (
        "I¦'m¦ SURE¦ they¦'LL¦ pay¦ $¦123¦456¦7¦.¦89¦,¦ don¦'t¦ ¦ we¦?\r\n\n¦ ¦ go",
        'x¦1¦\n¦\t¦ y¦//¦z¦ <¦b¦>"¦q¦"¦ ...\n\n¦你好¦，¦世界¦ Grüße¦ ¦12¦\n¦  ',
        "[a¦]¦ HTMLParse¦ x¦_y¦ (¦1¦+¦2¦)=¦3¦;¦ '¦5¦'Dx¦     ¦ z¦ न्य",
    ),
    "spark2_5": (
        "I¦'m¦ SURE¦ they¦'LL¦ pay¦ $¦1¦2¦3¦4¦5¦6¦7¦.¦8¦9¦,¦ don¦'t¦ ¦ we¦?¦\r¦\n¦\n¦ ¦ go",
        'x¦1¦\n¦\t¦ y¦//¦z¦ <¦b¦>"¦q¦"¦ ...¦\n¦\n¦你好¦，¦世界¦ Grüße¦ ¦1¦2¦\n¦  ',
        "[a¦]¦ HTMLParse¦ x¦_y¦ (¦1¦+¦2¦)=¦3¦;¦ '¦5¦'Dx¦     ¦ z¦ न्य",
    ),
    "youtu": (
        "I'm¦ SURE¦ they'LL¦ pay¦ $¦1¦2¦3¦4¦5¦6¦7¦.¦8¦9¦,¦ don't¦ ¦ we¦?\r\n\n¦ ¦ go",
        'x¦1¦\n¦\t¦ y¦//¦z¦ <¦b¦>"¦q¦"¦ ...\n\n¦你好¦，¦世界¦ Grüße¦ ¦1¦2¦\n¦  ',
        "[a¦]¦ HTMLParse¦ x¦_y¦ (¦1¦+¦2¦)=¦3¦;¦ '¦5¦'Dx¦     ¦ z¦ न्य",
    ),
    "falcon": (
        "I¦'¦m¦ SURE¦ they¦'¦LL¦ pay¦ ¦$¦123¦456¦7¦.¦89¦,¦ don¦'¦t¦ ¦ we¦?¦\r\n\n ¦ go",
        'x¦1¦\n\t¦ y¦//¦z¦ ¦<¦b¦>"¦q¦"¦ ¦...¦\n¦\n¦你好¦，¦世界¦ Grüße¦ 12¦\n  ',
        "[¦a¦]¦ HTMLParse¦ x¦_¦y¦ ¦(¦1¦+¦2¦)=¦3¦;¦ ¦'¦5¦'¦Dx¦     ¦ z¦ न¦्¦य",
    ),
    "bloom poro-chat gpt3-finnish": (
        "I'm¦ SURE¦ they'LL¦ pay¦ $1234567¦.¦89¦,¦ don't¦ ¦ we¦?\r\n\n ¦ go",
        'x1¦\n\t¦ y//z¦ <b>"q"¦ ...\n\n¦你好¦，¦世界¦ Grüße¦ 12¦\n  ',
        "[a]¦ HTMLParse¦ x_y¦ (¦1+2¦)¦=3;¦ '5'Dx¦     ¦ z¦ न्य",
    ),
    "viking": (
        "I'm¦ SURE¦ they'LL¦ pay¦ $¦1¦2¦3¦4¦5¦6¦7¦.¦8¦9¦,¦ don't¦ ¦ we¦?\r\n\n ¦ go",
        'x¦1¦\n\t¦ y//z¦ <b>"q"¦ ...\n\n¦你好¦，¦世界¦ Grüße¦ ¦1¦2¦\n  ',
        "[a]¦ HTMLParse¦ x_y¦ (¦1¦+¦2¦)¦=¦3¦;¦ '¦5¦'Dx¦     ¦ z¦ न्य",
    ),
    "tekken": (
        "I¦'m¦ SURE¦ they¦'LL¦ pay¦ $¦1¦2¦3¦4¦5¦6¦7¦.¦8¦9¦,¦ don¦'t¦ ¦ we¦?\r\n\n¦ ¦ go",
        'x¦1¦\n¦\t¦ y¦//¦z¦ <¦b¦>"¦q¦"¦ ...\n\n¦你好¦，世界¦ Grüße¦ ¦1¦2¦\n¦  ',
        "[a¦]¦ HTMLParse¦ x¦_y¦ (¦1¦+¦2¦)=¦3¦;¦ '¦5¦'Dx¦     ¦ z¦ न्य",
    ),
    "gpt-4o llama4 kanana2 talkie minimax-m2 granite-embed-multi-97m": (
        "I'm¦ SURE¦ they'LL¦ pay¦ $¦123¦456¦7¦.¦89¦,¦ don't¦ ¦ we¦?\r\n\n¦ ¦ go",
        'x¦1¦\n¦\t¦ y¦//¦z¦ <¦b¦>"¦q¦"¦ ...\n\n¦你好¦，世界¦ Grüße¦ ¦12¦\n¦  ',
        "[a¦]¦ HTMLParse¦ x¦_y¦ (¦1¦+¦2¦)=¦3¦;¦ '¦5¦'Dx¦     ¦ z¦ न्य",
    ),
    "tiny_aya cohere2moe": (
        "I'm¦ SURE¦ they'LL¦ pay¦ $¦1¦234¦567¦.¦89¦,¦ don't¦ ¦ we¦?\r\n\n¦ ¦ go",
        'x¦1¦\n¦\t¦ y¦//¦z¦ <¦b¦>"¦q¦"¦ ...\n\n¦你好¦，世界¦ Grüße¦ ¦12¦\n¦  ',
        "[a¦]¦ HTMLParse¦ x¦_y¦ (¦1¦+¦2¦)=¦3¦;¦ '¦5¦'Dx¦     ¦ z¦ न्य",
    ),
    "kimi-k2": (
        "I'm¦ SURE¦ they'LL¦ pay¦ $¦123¦456¦7¦.¦89¦,¦ don't¦ ¦ we¦?\r\n\n¦ ¦ go",
        'x¦1¦\n¦\t¦ y¦//¦z¦ <¦b¦>"¦q¦"¦ ...\n\n¦你好¦，¦世界¦ Grüße¦ ¦12¦\n¦  ',
        "[a¦]¦ HTMLParse¦ x¦_y¦ (¦1¦+¦2¦)=¦3¦;¦ '¦5¦'Dx¦     ¦ z¦ न्य",
    ),
    "superbpe": (
        "I'm SURE they'LL pay $¦1¦234¦567¦.¦89¦, don't  we?\r\n\n  go",
        'x¦1¦\n\t y//z <b>"q" ...\n\n你好，世界 Grüße ¦12¦\n  ',
        "[a] HTMLParse x_y (¦1¦+¦2¦)=¦3¦; '¦5¦'Dx      z न्य",
    ),
    "seed-coder": (
        "I¦'m¦ SURE¦ they¦'LL¦ pay¦ $¦1¦2¦3¦4¦5¦6¦7¦.¦8¦9¦,¦ don¦'t¦ ¦ we¦?¦\r\n\n¦ ¦ go",
        'x¦1¦\n¦\t¦ y¦//¦z¦ <¦b¦>"¦q¦"¦ ...¦\n\n¦你好¦，世界¦ Grüße¦ ¦1¦2¦\n¦  ',
        "[a¦]¦ HTMLParse¦ x¦_y¦ (¦1¦+¦2¦)=¦3¦;¦ '¦5¦'D¦x¦     ¦ z¦ न¦्य",
    ),
    "ufakzeka": (
        "I¦'m¦ SURE¦ they¦'LL¦ pay¦ $¦1¦2¦3¦4¦5¦6¦7¦.¦8¦9¦,¦ don¦'t¦ ¦ we¦?\r\n\n¦ ¦ go",
        'x¦1¦\n¦\t¦ y¦//¦z¦ <¦b¦>"¦q¦"¦ ...\n\n¦你好¦，世界¦ Grüße¦ ¦1¦2¦\n¦  ',
        "[a¦]¦ HTMLParse¦ x¦_y¦ (¦1¦+¦2¦)=¦3¦;¦ '¦5¦'Dx¦     ¦ z¦ न¦्य",
    ),
    "afmoe": (
        "I¦'m¦ SURE¦ they¦'LL¦ pay¦ $¦1¦234¦567¦.¦89¦,¦ don¦'t¦ ¦ we¦?\r\n\n¦ ¦ go",
        'x¦1¦\n¦\t¦ y¦//¦z¦ <¦b¦>"¦q¦"¦ ...\n\n¦你好¦，¦世界¦ Grüße¦ ¦12¦\n¦  ',
        "[a¦]¦ HTMLParse¦ x¦_y¦ (¦1¦+¦2¦)=¦3¦;¦ '¦5¦'Dx¦     ¦ z¦ न्य",
    ),
    "laguna": (
        "I¦'m¦ SURE¦ they¦'LL¦ pay¦ $¦1¦2¦3¦4¦5¦6¦7¦.¦8¦9¦,¦ don¦'t¦ ¦ we¦?\r¦\n\n¦ ¦ go",
        'x¦1¦\n¦\t¦ y¦//¦z¦ <¦b¦>"¦q¦"¦ ...¦\n\n¦你好¦，世界¦ Grüße¦ ¦1¦2¦\n¦  ',
        "[a¦]¦ HTMLParse¦ x¦_y¦ (¦1¦+¦2¦)=¦3¦;¦ '¦5¦'D¦x¦     ¦ z¦ न¦्य",
    ),
    "exaone-moe": (
        "I¦'m¦ SURE they¦'LL¦ pay¦ $¦1¦2¦3¦4¦5¦6¦7¦.¦8¦9¦,¦ don¦'t¦ ¦ we¦?\r¦\n\n¦ ¦ go",
        'x¦1¦\n¦\t¦ y¦//¦z¦ <¦b¦>"¦q¦"¦ ...\n¦\n¦你好¦，世界 Grüße¦ ¦1¦2¦\n¦  ',
        "[a¦]¦ HTMLParse x¦_y¦ (¦1¦+¦2¦)=¦3¦;¦ '¦5¦'D¦x¦     ¦ z न्य",
    ),
    "chameleon": (
        "I¦'¦m¦ SURE¦ they¦'¦LL¦ pay¦ ¦$¦1¦2¦3¦4¦5¦6¦7¦.¦8¦9¦,¦ don¦'¦t¦  ¦we¦?¦\r¦\n¦\n¦  ¦go",
        'x¦1¦\n¦\t¦ y¦/¦/¦z¦ ¦<¦b¦>¦"¦q¦"¦ ¦.¦.¦.¦\n¦\n¦你好¦，¦世界¦ Grüße¦ ¦1¦2¦\n¦  ',
        "[¦a¦]¦ HTMLParse¦ x¦_¦y¦ ¦(¦1¦+¦2¦)¦=¦3¦;¦ ¦'¦5¦'¦Dx¦    ¦  ¦z¦ न¦्¦य",
    ),
    "jais-2": (
        "I¦'m¦ SURE¦ they¦'LL¦ pay¦ $¦123¦456¦7¦.¦89¦,¦ don¦'t¦ ¦ we¦?\r\n\n¦ ¦ go",
        'x¦1¦\n¦\t¦ y¦//¦z¦ <¦b¦>"¦q¦"¦ ...\n\n¦你好¦，世界¦ Grüße¦ ¦12¦\n¦  ',
        "[a¦]¦ HTMLParse¦ x¦_y¦ (¦1¦+¦2¦)=¦3¦;¦ '¦5¦'D¦x¦    ¦ ¦ z¦ न¦्य",
    ),
}


def test_what_else_a_name_means() -> None:
    kinds = PRE_TOKENIZERS.items()
    composing = {"qwen2", "qwen35", "mpt", "olmo", "modern-bert", "command-r"}
    assert {name for name, kind in kinds if kind.composes} == composing
    llama = {"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"}
    llama |= {"tekken"}
    assert {name for name, kind in kinds if kind.adds_bos} == llama | {"chameleon"}
    whole = llama | {"glm4", "glm5", "youtu", "minicpm5", "granite-embed-multi-97m"}
    assert {name for name, kind in kinds if kind.ignore_merges} == whole


def test_each_name_has_its_lines() -> None:
    named = [name for names in SPLITS for name in names.split()]
    assert sorted(named) == sorted(PRE_TOKENIZERS)


@pytest.mark.parametrize("names", SPLITS)
def test_a_text_is_split_as_llama_cpp_does(names: str) -> None:
    for name in names.split():
        kind = PRE_TOKENIZERS[name]
        *splits, letters = kind.pre_tokenizer()["pretokenizers"]
        assert letters["type"] == "ByteLevel"
        parts = {"type": "Sequence", "pretokenizers": splits}
        model = {"type": "BPE", "vocab": {}, "merges": []}
        parsed = Tokenizer.from_str(json.dumps({"version": "1.0", "pre_tokenizer": parts, "model": model}))
        found = tuple("¦".join(word for word, _ in parsed.pre_tokenizer.pre_tokenize_str(text)) for text in TEXTS)
        assert found == SPLITS[names], name
