"""What factories do, and models of other libraries: the module that eager loading gives, bit for bit."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fetching import fetch_into
from medusa_runtime.errors import MismatchError, WeightsError
from medusa_runtime.load.factory.build import build
from medusa_runtime.load.factory.options import BuildOptions
from medusa_runtime.region.reader import Region
from torch import Tensor, nn

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
IMAGE = torch.linspace(-1, 1, 3 * 64).view(1, 3, 8, 8)


def values(module: nn.Module) -> dict[str, Tensor]:
    """Other values than any initial ones; what is tied stays equal."""
    draw = torch.Generator().manual_seed(7)
    found: dict[int, Tensor] = {}
    for tensor in module.state_dict(keep_vars=True).values():
        drawn = torch.rand(tensor.shape, generator=draw).to(tensor.dtype)
        found.setdefault(id(tensor), drawn if tensor.is_floating_point() else tensor + 1)
    return {name: found[id(tensor)] for name, tensor in module.state_dict(keep_vars=True).items()}


def check(
    folder: Path,
    factory: Callable[[], nn.Module],
    call: Callable[[nn.Module], Tensor],
    *,
    stored: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
    **options: Any,
) -> nn.Module:
    """Build it from a file while another process fetches it, call it at once, and compare it with eager loading."""
    eager = factory()
    state = stored(values(eager))
    eager.load_state_dict(state, strict=options.get("strict", True))
    torch.save(state, folder / "model.pt")
    region = Region.create()
    pid = os.fork()
    if not pid:
        try:
            fetch_into(region, str(folder / "model.pt"))
        finally:
            os._exit(0)  # what failed is in the region
    try:
        module, loader = build(region, factory, BuildOptions(**options))
        with torch.inference_mode():
            assert torch.equal(call(module), call(eager))
            loader.wait()
            assert torch.equal(call(module), call(eager))
        found, expected = (dict(one.named_buffers()) | dict(one.named_parameters()) for one in (module, eager))
        assert list(found) == list(expected)
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name
            assert found[name].stride() == tensor.stride(), name
            assert found[name].dtype == tensor.dtype, name
        return module
    finally:
        os.waitpid(pid, 0)
        region.close()


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(8, 5).t())
        self.plain = nn.Parameter(torch.randn(5, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.turned + self.plain).t()


def channels_last() -> nn.Module:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1))
    return net.eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def test_the_memory_format_is_the_factorys(tmp_path: Path) -> None:
    module = check(tmp_path, channels_last, lambda m: m(IMAGE))
    assert module.get_parameter("0.weight").is_contiguous(memory_format=torch.channels_last)
    check(tmp_path, Turned, lambda m: m(torch.ones(3, 8)))
    check(
        tmp_path, Turned, lambda m: m(torch.ones(3, 8)), stored=lambda s: {k: t.t().clone().t() for k, t in s.items()}
    )


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(8.0).outer(torch.arange(8.0)).sin(), persistent=False)
        self.register_buffer("steps", torch.ones(8).cumsum(0))
        self.scale = torch.full((8,), 0.5)
        self.dense = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.dense(x) @ self.get_buffer("table") * self.scale + self.get_buffer("steps"))


def test_what_is_made_on_the_meta_device_has_values(tmp_path: Path) -> None:
    """As many write it, to save memory, before ``load_state_dict(assign=True)``."""

    def factory() -> nn.Module:
        if not on_meta:
            return Positions()
        with torch.device("meta"):
            return Positions()

    on_meta = False
    state = values(Positions())
    eager = Positions()
    eager.load_state_dict(state)
    torch.save(state, tmp_path / "model.pt")
    region, on_meta = Region.create(), True
    try:
        fetch_into(region, str(tmp_path / "model.pt"))
        module, loader = build(region, factory)
        x = torch.rand(2, 8)
        assert torch.equal(module(x), eager(x))
        loader.wait()
        with pytest.raises(WeightsError, match=r"buffer table .* no value"):
            build(region, lambda: Positions().to("meta"))
    finally:
        region.close()


def test_counters_of_batch_norms_may_be_missing(tmp_path: Path, filling: Callable[..., Any]) -> None:
    """They are in files of old versions, and ``load_state_dict`` does without."""

    def without(state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in state.items() if "num_batches" not in name}

    check(tmp_path, channels_last, lambda m: m(IMAGE), stored=without)
    filled = filling({name: t for name, t in values(channels_last()).items() if "var" not in name}).complete()
    with pytest.raises(MismatchError, match=r"1 missing: 1\.running_var"):
        build(filled.region, channels_last)[1].wait()


class Own(Tensor):
    """A tensor of the user's own kind."""


class Keeping(nn.Module):
    """Keeps what looks into the memory that ``load_state_dict`` writes to, in one of many ways."""

    def __init__(self, keep: Callable[[Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.drawn, self.counted = torch.randn(8), torch.arange(8.0)
        self.one, self.two = nn.Parameter(self.drawn), nn.Parameter(self.counted)
        self.own = nn.Parameter(torch.randn(8).as_subclass(Own))
        self.register_buffer("steps", torch.ones(8).cumsum(0))
        self.dense = nn.Linear(8, 8)
        kept = keep(self)
        del self.drawn, self.counted
        self.kept = kept if callable(kept) else lambda: kept[0]

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.dense(x) * self.kept().sum(0) + self.one * self.two + self.own.as_subclass(Tensor)
        return torch.as_tensor(hidden * self.get_buffer("steps"))


KEPT: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda m: [torch.ones(8)],
    "a view": lambda m: [m.dense.weight.t()],
    "a closure's view": lambda m: (lambda bias: lambda: bias)(m.dense.bias.view(1, 8)),
    "computed": lambda m: [m.dense.weight * 2],
    "data": lambda m: [m.dense.weight.data[1]],
    "drawn": lambda m: [m.drawn],
    "counted": lambda m: [m.counted],
    "a view of a buffer": lambda m: [m.steps[2:3]],
}


@pytest.mark.parametrize("keep", KEPT.values(), ids=KEPT)
def test_what_looks_into_weights_sees_what_is_loaded(tmp_path: Path, keep: Callable[[Any], Any]) -> None:
    module = check(tmp_path, lambda: Keeping(keep), lambda m: m(torch.linspace(-1, 1, 16).view(2, 8)))
    assert type(module.own) is Own


def test_what_torch_jit_has_compiled_is_named(filling: Callable[..., Any]) -> None:
    scripted = torch.jit.script(nn.Linear(8, 4))
    filled = filling(dict(scripted.state_dict(prefix="0."))).complete()
    with pytest.raises(WeightsError, match=r"module '0' .* is compiled by torch\.jit"):
        build(filled.region, lambda: nn.Sequential(scripted))


class Renamed(nn.Module):
    """As weight_norm of PyTorch's parametrizations, which reads files of the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.last = nn.Linear(8, 8)
        self.last._register_load_state_dict_pre_hook(self.bring_up_to_date)  # type: ignore[no-untyped-call]

    def bring_up_to_date(self, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
        if f"{prefix}gamma" in state:
            gamma = state.pop(f"{prefix}gamma")
            state[f"{prefix}weight"] = gamma * 2 if self.computes else gamma

    computes = False

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.last(self.dense(x)))


OLD = {
    "dense.parametrizations.weight.original0": "dense.weight_g",
    "dense.parametrizations.weight.original1": "dense.weight_v",
    "last.weight": "last.gamma",
}


def test_old_names_are_brought_up_to_date_by_the_modules_own_hooks(tmp_path: Path, filling: Callable[..., Any]) -> None:
    def old(state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {OLD.get(name, name): tensor for name, tensor in state.items()}

    check(tmp_path, Renamed, lambda m: m(torch.ones(2, 8)), stored=old)
    check(tmp_path, Renamed, lambda m: m(torch.ones(2, 8)))
    computing = type("Computing", (Renamed,), {"computes": True})
    with pytest.raises(MismatchError, match=r"hook of the module computes 'last\.weight'"):
        build(filling(old(values(Renamed()))).complete().region, computing)[1].wait()


class Loading(nn.Linear):
    """Reads old names in a way of its own, as those did that are older than hooks; or computes, or keeps more."""

    turns = False

    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        if f"{prefix}kernel" in state:
            kernel = state.pop(f"{prefix}kernel")
            assert kernel.shape == self.weight.shape
            state[f"{prefix}weight"] = kernel.t() if self.turns else kernel
        super()._load_from_state_dict(state, prefix, *rest)


class Turning(Loading):
    turns = True


class Counting(nn.Linear):
    def set_extra_state(self, state: Any) -> None: ...


def test_a_parts_own_way_of_loading(tmp_path: Path, filling: Callable[..., Any]) -> None:
    def old(state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name.replace("1.weight", "1.kernel"): tensor for name, tensor in state.items()}

    def stack(kind: type[nn.Linear]) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(8), kind(8, 8)).eval()

    for stored in (old, dict):
        check(tmp_path, lambda: stack(Loading), lambda m: m(torch.ones(2, 8)), stored=stored)
    filled = filling(old(values(stack(Turning)))).complete()
    with pytest.raises(MismatchError, match=r"computes '1\.weight' when it is loaded"):
        build(filled.region, lambda: stack(Turning))[1].wait()
    with pytest.raises(WeightsError, match=r"module '1' .* has extra state"):
        build(filled.region, lambda: stack(Counting))


class Summing(nn.Linear):
    """Computes something once it is loaded."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.sum = 0.0
        self.register_load_state_dict_post_hook(self.add_up)  # type: ignore[no-untyped-call]

    @staticmethod
    def add_up(module: Summing, _: Any) -> None:
        module.sum = float(module.weight.detach().sum())


def test_what_follows_load_state_dict_is_done(tmp_path: Path) -> None:
    module = check(tmp_path, lambda: nn.Sequential(Summing()), lambda m: m(torch.ones(2, 8)))
    summing = module.get_submodule("0")
    assert isinstance(summing, Summing)
    assert summing.sum == float(summing.weight.detach().sum())


TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
SOUND = torch.linspace(0, 90, 1600).sin().view(1, -1)
PICTURE = torch.linspace(-1, 1, 3 * 32 * 32).view(1, 3, 32, 32)


def library_models() -> dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Tensor]]]:
    """Of transformers, by its own factories, in tiny sizes: speech to states and to text, and pictures beside text."""
    import transformers as hf

    speech = hf.Wav2Vec2Config(
        vocab_size=32, conv_dim=[16, 16], conv_stride=[5, 2], conv_kernel=[10, 3], num_feat_extract_layers=2,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, **TINY,
    )  # fmt: skip
    whisper = hf.WhisperConfig(
        vocab_size=60, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=30,
        max_target_positions=20, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
    )  # fmt: skip
    both = hf.CLIPConfig(
        text_config={"vocab_size": 60, "max_position_embeddings": 16, "eos_token_id": 1, **TINY},
        vision_config={"image_size": 32, "patch_size": 8, **TINY},
        projection_dim=16,
    )
    tokens = torch.tensor([[5, 7, 9, 1]])
    spectrum = torch.linspace(-1, 1, 80 * 60).view(1, 80, 60)
    return {
        "wav2vec2": (lambda: hf.AutoModelForCTC.from_config(speech).eval(), lambda m: m(SOUND).logits),
        "whisper": (
            lambda: hf.WhisperForConditionalGeneration(whisper).eval(),
            lambda m: m(spectrum, decoder_input_ids=tokens).logits,
        ),
        "whisper's encoder": (
            lambda: hf.WhisperModel(whisper).get_encoder().eval(),
            lambda m: m(spectrum).last_hidden_state,
        ),
        "clip": (
            lambda: hf.AutoModel.from_config(both).eval(),
            lambda m: m(input_ids=tokens, pixel_values=PICTURE).logits_per_image,
        ),
        "vit": (
            lambda: hf.ViTModel(hf.ViTConfig(image_size=32, patch_size=8, **TINY)).eval(),
            lambda m: m(PICTURE).last_hidden_state,
        ),
    }


@pytest.mark.parametrize("name", ["wav2vec2", "whisper", "whisper's encoder", "clip", "vit"])
def test_models_of_transformers(tmp_path: Path, name: str) -> None:
    pytest.importorskip("transformers")
    factory, call = library_models()[name]
    check(tmp_path, factory, call)


def test_speech_from_a_file_of_old_names(tmp_path: Path) -> None:
    """As wav2vec 2.0's published weights are, from before PyTorch had parametrizations."""
    pytest.importorskip("transformers")
    factory, call = library_models()["wav2vec2"]
    new = "parametrizations.weight.original"

    def old(state: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {name.replace(f"{new}0", "weight_g").replace(f"{new}1", "weight_v"): t for name, t in state.items()}
        assert len(found.keys() - state.keys()) == 2
        return found

    check(tmp_path, factory, call, stored=old)


class Noisy(nn.Module):
    """Draws what no checkpoint brings, behind initial values."""

    def __init__(self, seed: int | None, draw: Callable[[], Tensor]) -> None:
        super().__init__()
        torch.seed() if seed is None else torch.manual_seed(seed)
        self.dense = nn.Linear(8, 8)
        self.register_buffer("noise", draw(), persistent=False)
        self.kept = draw()


@pytest.mark.parametrize("draw", [lambda: torch.randn(8), lambda: torch.zeros(8).normal_()], ids=["made", "filled"])
@pytest.mark.parametrize("seed", [None, 3])
def test_random_numbers_of_a_seed_are_those_of_eager_construction(
    filling: Callable[..., Any], seed: int | None, draw: Callable[[], Tensor]
) -> None:
    made: list[Noisy] = []

    def factory() -> Noisy:
        made.append(Noisy(seed, draw))
        return made[-1]

    eager = Noisy(seed, draw)
    module, loader = build(filling(dict(eager.state_dict())).complete().region, factory)
    loader.wait()
    assert torch.equal(module.dense.weight, eager.dense.weight)
    assert len(made) == (1 if seed is None else 2)  # nobody knows which numbers would have come without a seed
    if seed is not None:
        assert torch.equal(module.get_buffer("noise"), eager.get_buffer("noise"))
        assert torch.equal(module.kept, eager.kept)
