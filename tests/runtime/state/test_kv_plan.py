"""How large the KV cache is: recorded, checked against what is free, and calculated where that does not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.checkpoint.reader import open_checkpoint
from medusa_runtime.config import Settings
from medusa_runtime.errors import ConfigError, StateError
from medusa_runtime.region.reader import Region
from medusa_runtime.state.kinds import file_name
from medusa_runtime.state.kv_plan import Geometry, KvPlan, Least, activation_bytes, graph_bytes, plan_kv_cache
from medusa_runtime.timeline import Timeline

GIB = 1 << 30
EXAMPLE = Path(__file__).parents[3] / "examples" / "pydoc-lm"
GEOMETRY = Geometry(16, 1 << 20, (("blocks", 0), ("tokens", 16)), "bfloat16", 1024)
SETTINGS = Settings(max_concurrency=4)  # 64 blocks a sequence: 256 in all
RECORDED = KvPlan(16, 1 << 20, 256, 1024, 100 << 20, GEOMETRY.layout, "bfloat16")


LEAST = Least(40 << 20, 2 << 20)  # and 48 MiB for 2,048 tokens


def planned(free_bytes: int, recorded: KvPlan | None = None, *, least: Least | None = None, **settings: Any) -> KvPlan:
    return plan_kv_cache(
        GEOMETRY,
        replace(SETTINGS, **settings),
        free_bytes=free_bytes,
        activation_bytes=50 << 20,
        recorded=recorded,
        least=least,
    )


def test_without_a_record_it_is_calculated() -> None:
    made = planned(GIB)
    assert (made.blocks, made.max_model_len, made.source, made.activation_bytes) == (256, 1024, "computed", 50 << 20)


def test_a_record_that_fits_is_taken_as_it_is() -> None:
    assert planned(GIB, RECORDED) == replace(RECORDED, source="recorded")
    assert planned(RECORDED.needed_bytes, RECORDED).source == "recorded"


def test_a_record_that_does_not_fit_now_is_calculated_again_by_its_measurement(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    made = planned(RECORDED.needed_bytes - 1, RECORDED)
    (said,) = caplog.records  # usual for models of long contexts, and nothing to warn of
    assert (said.levelname, "the KV cache gets what is free here now" in said.getMessage()) == ("INFO", True)
    assert (made.source, made.activation_bytes, made.blocks) == ("recomputed", 100 << 20, 255)
    assert made.needed_bytes < RECORDED.needed_bytes


def test_the_margin_and_the_activations_stay_free() -> None:
    made = planned(500 << 20)
    assert made.needed_bytes <= 500 << 20
    assert made.blocks == 500 - 50 - 256


@pytest.mark.parametrize(
    ("free_mb", "blocks", "margin_mb"),
    [
        (1024, 256, 256),  # plenty: all that was asked for
        (540, 540 - 256 - 50, 256),
        (400, 400 - 200 - 50, 200),  # short: half of it stays free
        (100, 34, 50),  # a step has at most as many tokens as the cache: here 544, which take 35 MiB less than 2,048
        (50, 5, 40),
        (44, 1, 40),
    ],
)
def test_where_memory_is_short_less_stays_free(free_mb: int, blocks: int, margin_mb: int) -> None:
    made = planned(free_mb << 20, least=LEAST)
    assert (made.blocks, made.margin_bytes >> 20) == (blocks, margin_mb)
    assert made.needed_bytes <= free_mb << 20
    again = planned(free_mb << 20, replace(RECORDED, activation_bytes=50 << 20), least=LEAST)
    assert (again.blocks, again.margin_bytes, again.activation_bytes) == (
        made.blocks,
        made.margin_bytes,
        made.activation_bytes,
    )


def test_what_does_not_fit_at_all_is_refused_with_what_would() -> None:
    expected = (
        r"expected 44 MiB of free memory beside the weights \(43 MiB of it for all else\), found 43 MiB; give the"
    )
    with pytest.raises(ConfigError, match=expected):
        planned(43 << 20, least=LEAST)
    with pytest.raises(ConfigError, match=r"one sequence needs 512 \(32 MiB\): expected 86 MiB"):
        planned(80 << 20, least=LEAST, max_model_len=512)


def test_graphs_have_room_beside_the_cache() -> None:
    """Their pool, workspaces, executables and images are made after the cache, which must not have taken it all."""
    with_graphs = plan_kv_cache(
        GEOMETRY, SETTINGS, free_bytes=600 << 20, activation_bytes=50 << 20, graph_bytes=200 << 20
    )
    assert with_graphs.blocks == 600 - 50 - 200 - 256
    assert with_graphs.needed_bytes <= 600 << 20
    recorded = replace(RECORDED, graph_bytes=300 << 20)
    assert KvPlan.from_bytes(recorded.to_bytes()) == recorded
    made = planned(recorded.needed_bytes - 1, recorded)
    assert (made.source, made.graph_bytes, made.blocks) == ("recomputed", 300 << 20, 255)
    more = plan_kv_cache(
        GEOMETRY, SETTINGS, free_bytes=GIB, activation_bytes=0, graph_bytes=400 << 20, recorded=recorded
    )
    assert more.source == "recorded"
    fewer = replace(SETTINGS, max_concurrency=5)
    more = plan_kv_cache(
        GEOMETRY, fewer, free_bytes=2 * GIB, activation_bytes=0, graph_bytes=400 << 20, recorded=recorded
    )
    assert more.graph_bytes == 400 << 20, "a record of fewer graphs does not say what more take"


def test_without_a_bundle_the_room_for_graphs_is_estimated() -> None:
    assert graph_bytes(0, rows=0, blocks=100, vocabulary=1000, item_bytes=2) == 0
    one = graph_bytes(1, rows=1, blocks=512, vocabulary=128_000, item_bytes=2)
    all_of_them = graph_bytes(35, rows=256, blocks=512, vocabulary=128_000, item_bytes=2)
    assert 192 << 20 < one < 256 << 20
    assert 600 << 20 < all_of_them < GIB


@pytest.mark.parametrize("settings", [{"max_concurrency": 2}, {"max_model_len": 512}])
def test_a_record_of_other_settings_gives_its_measurement_only(settings: dict[str, int]) -> None:
    made = planned(GIB, RECORDED, **settings)
    assert (made.source, made.blocks, made.activation_bytes) == ("computed", 128, 100 << 20)


def test_a_size_that_was_asked_for_is_kept() -> None:
    assert planned(GIB, RECORDED, kv_cache_mb=100).blocks == 100
    assert planned(0, RECORDED, kv_cache_mb=100).blocks == 100


def test_a_record_of_another_layout_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    made = planned(GIB, replace(RECORDED, block_bytes=5))
    assert (made.source, made.activation_bytes) == ("computed", 50 << 20)
    assert "another cache layout" in caplog.text


def test_too_little_is_one_clear_error() -> None:
    expected = (
        r"the KV cache has room for 0 tokens, but one sequence needs 16 \(1 MiB\): expected 307 MiB of free memory "
        r"beside the weights \(306 MiB of it for all else\), found 10 MiB; give the container more memory"
    )
    with pytest.raises(ConfigError, match=rf"^{expected}$"):
        planned(10 << 20, RECORDED)
    with pytest.raises(ConfigError, match=r"one sequence needs 1024 .*MiB\); lower --max-model-len, or raise --kv-"):
        planned(GIB, max_model_len=1024, kv_cache_mb=3)
    with pytest.raises(ConfigError, match="expected at most 1024"):
        planned(GIB, max_model_len=2048)


def test_a_short_cache_shortens_sequences(caplog: pytest.LogCaptureFixture) -> None:
    assert planned(GIB, kv_cache_mb=10).max_model_len == 160
    assert "so max_model_len is 160, not 1024" in caplog.text


def test_a_plan_survives_json() -> None:
    assert KvPlan.from_bytes(RECORDED.to_bytes()) == RECORDED


@pytest.mark.parametrize(
    "change",
    [{"format": 2}, {"blocks": 0}, {"block_bytes": "1"}, {"activation_bytes": -1}, {"layout": 5}, {"more": 1}],
)
def test_what_is_no_plan_is_refused(change: dict[str, Any]) -> None:
    document = json.loads(RECORDED.to_bytes()) | change
    with pytest.raises(StateError, match="expected a KV plan"):
        KvPlan.from_bytes(json.dumps(document).encode())
    with pytest.raises(StateError):
        KvPlan.from_bytes(b"\0")


def test_activations_grow_with_tokens_and_sequences() -> None:
    checkpoint = open_checkpoint(str(EXAMPLE))

    def needed(**settings: int) -> int:
        return activation_bytes(
            checkpoint.index, hidden=256, vocabulary=2048, item_bytes=2, settings=Settings(**settings)
        )

    assert needed(max_batched_tokens=64) < needed(max_batched_tokens=2048) < 32 * needed(max_batched_tokens=64)
    assert needed(max_concurrency=1) < needed(max_concurrency=64)


@pytest.mark.parametrize(
    ("recorded", "source"), [(None, "computed"), ("wanted", "recorded"), ("broken", "computed"), ("huge", "recomputed")]
)
def test_the_engine_starts_by_the_plan_in_its_region(region: Region, recorded: str | None, source: str) -> None:
    from medusa_runtime.engine.torch.engine import TorchEngine
    from medusa_runtime.fetch.prefetcher import RestoredCheckpoint, prefetch

    block_bytes, tokens = 32768, 512
    layout = (("layers", 4), ("keys and values", 2), ("blocks", 0), ("tokens", 16), ("kv_heads", 4), ("head_dim", 32))
    made = KvPlan(16, block_bytes, 4 * tokens // 16, tokens, 1 << 20, layout, "bfloat16")
    made = replace(made, activation_bytes=1 << 60) if recorded == "huge" else made
    data = {"wanted": made.to_bytes(), "huge": made.to_bytes(), "broken": b"{}"}.get(recorded or "")

    class Given:
        """In place of a bundle: this file."""

        def begin(self, store: object) -> None: ...

        def files(self) -> None: ...

        def archive(self, name: str) -> None: ...

        def confirms(self, *_: object) -> bool:
            return True

        def restore(self, checkpoint: Any) -> RestoredCheckpoint:
            return RestoredCheckpoint(checkpoint.index, None, {file_name("kv-plan"): data} if data else {}, {})

        def start(self, writer: object) -> None: ...

        def finish(self) -> None: ...

        def close(self) -> None: ...

    settings, timeline = Settings(max_concurrency=4, threads=1), Timeline.create("engine")
    prefetch(region, str(EXAMPLE), settings=settings, timeline=timeline, bundle=Given())
    engine = TorchEngine(region, settings, timeline)
    try:
        stage = next(stage for stage in timeline.stages() if stage.name == "kv_plan")
        assert stage.detail == {"tokens": 4 * tokens, "source": source}
        assert engine.info.kv_tokens == 4 * tokens
    finally:
        engine.close()
