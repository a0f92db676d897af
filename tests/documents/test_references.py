"""The pages that list something list all of it, and nothing else: metrics, error codes, checks, rows, architectures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from medusa_adapters.bench import fetch as product_fetch
from medusa_adapters.bench.coldstart.metrics import METRICS
from medusa_adapters.cli.doctor import examine
from medusa_adapters.trial import Trial
from medusa_runtime.checkpoint.text_part import WHOLES
from medusa_runtime.config import Settings
from medusa_runtime.errors import MedusaError
from medusa_runtime.load.quantized.scheme import METHODS
from medusa_runtime.models.architectures import ARCHITECTURES, ENCODERS

from benchmarks.coldstart.others import yardsticks
from benchmarks.coldstart.rows import ROWS
from benchmarks.fetch.__main__ import UNITS, row_names

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
EXAMPLE = ROOT / "examples" / "pydoc-lm"


def first_cells(page: str, heading: str = "") -> list[str]:
    """The names in backticks of the first column of a page's tables, or of those under one heading."""
    text = (DOCS / page).read_text()
    if heading:
        text = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
        assert text, f"{page} has no heading {heading}"
    return [name for cell in re.findall(r"(?m)^\| (`[^|]*) \|", text) for name in re.findall(r"`([^`]+)`", cell)]


def metrics_of(page: str) -> set[str]:
    """The names in the tables of a page that explain metrics; rows' names end in a colon."""
    tables = re.findall(r"(?m)^\| metric \|.*\n\|[-|]+\n((?:\|.*\n)+)", (DOCS / page).read_text())
    cells = [line.split("|")[1] for table in tables for line in table.splitlines()]
    named = [part.rpartition(":")[2] for cell in cells for part in cell.split(";")]
    return {name for part in named for name in re.findall(r"`([^`]+)`", part)}


def kinds(metrics: str) -> dict[str, str]:
    """Name → counter, gauge or histogram, of a page in Prometheus' format."""
    return dict(re.findall(r"(?m)^# TYPE (\S+) (\S+)$", metrics))


def documented_kinds(*headings: str) -> dict[str, str]:
    text = (DOCS / "metrics.md").read_text()
    sections = dict(re.findall(r"(?ms)^## ([^\n]+)\n(.*?)(?=^## |\Z)", text))
    return dict(re.findall(r"(?m)^\| `(\w+)` \| (\w+) \|", "".join(sections[heading] for heading in headings)))


def engines_of(name: str) -> set[str]:
    row = re.search(rf"(?m)^\| `{name}` \| \w+ \| ([^|]+) \|", (DOCS / "metrics.md").read_text())
    assert row is not None
    return {"torch", "vllm", "encoders"} if row[1] == "all" else set(row[1].split(", "))


def test_metrics_are_those_of_a_running_function() -> None:
    """Of the torch engine. What only other engines report is held against their code below."""
    with Trial("--model", str(EXAMPLE)) as function:
        function.post("/v1/completions", json.dumps({"prompt": "This", "max_tokens": 3}))
        served = kinds(function.get("/metrics").text)
    documented = documented_kinds("Requests", "The start", "Processes", "The engine")
    elsewhere = {name for name in documented_kinds("The engine") if "torch" not in engines_of(name)}
    assert served == {name: kind for name, kind in documented.items() if name not in elsewhere}


def test_metrics_of_other_engines_are_those_that_they_report() -> None:
    files = {
        "vllm": ("medusa_vllm/engine.py", "medusa_runtime/engine/serving/requests.py"),
        "encoders": ("medusa_runtime/engine/encoder/engine.py",),
    }
    for engine, names in files.items():
        sources = [(ROOT / "runtime" / name).read_text() for name in names]
        stats = "".join(source.partition("def stats(")[2].partition("\n    def ")[0] for source in sources)
        reported = {f"medusa_engine_{name}" for name in re.findall(r'"(\w+)":', stats)}
        assert reported == {name for name in documented_kinds("The engine") if engine in engines_of(name)}, engine


def test_metrics_of_openfaas_are_those_on_its_port() -> None:
    from medusa_adapters.platforms.metrics_server import CallMetrics

    calls = CallMetrics()
    calls.count("GET", 200, 0.1)
    assert kinds(calls.page(0)) == documented_kinds("On OpenFaaS")


def error_codes(kind: type[MedusaError] = MedusaError) -> set[str]:
    return {kind.code}.union(*(error_codes(each) for each in kind.__subclasses__()))


def test_every_error_code_is_explained() -> None:
    assert sorted(first_cells("troubleshooting.md", "Reading an error")) == sorted(error_codes())


def codes_of_answers(package: str) -> set[str]:
    """The codes of errors that a package answers clients with."""
    code = re.compile(r'\bcode(?:"\s*:|: str =|=) ?"(\w+)"')
    return {name for file in (ROOT / package).rglob("*.py") for name in code.findall(file.read_text())}


def test_every_code_that_a_client_gets_is_explained() -> None:
    errors = (DOCS / "openai.md").read_text().partition("\n## Errors\n")[2].partition("\n## ")[0]
    gateway = (DOCS / "cluster" / "gateway.md").read_text()
    explained, of_gateways = (set(re.findall(r"`([a-z_]+)`", page)) for page in (errors, gateway))
    assert codes_of_answers("handler") <= explained
    assert codes_of_answers("runtime/medusa_cluster/gateway") <= explained | of_gateways


def test_checks_of_doctor_that_can_fail_are_explained() -> None:
    checked = {finding.name for finding in examine(Settings(model=str(EXAMPLE), port=0), chosen=False)} | {"fits"}
    assert set(first_cells("troubleshooting.md", "Start here")) <= checked


def test_rows_of_the_benchmarks_are_explained() -> None:
    starts, listed = set(first_cells("benchmarks/starts.md")), set(first_cells("benchmarks/fetching.md"))
    assert set(ROWS) | {yardstick.name for yardstick in yardsticks()} <= starts
    import_alone = {f"{name}-{how}" for name in row_names() if name == "import-torch" for how in ("alone", "beside")}
    assert {name for name in row_names() if name != "import-torch"} | import_alone <= listed


def test_metrics_of_the_benchmarks_are_explained_and_no_others() -> None:
    assert metrics_of("benchmarks/fetching.md") == set(UNITS) | set(product_fetch.METRICS)
    assert metrics_of("benchmarks/starts.md") == set(METRICS)


def test_supported_architectures_are_those_of_the_registry() -> None:
    listed = first_cells("models.md", "The torch engine")
    assert sorted(set(listed)) == sorted({*ARCHITECTURES, *ENCODERS, *WHOLES, "architectures", "model_type"})


def test_quantizations_are_those_that_are_read() -> None:
    assert set(first_cells("models.md", "Quantized weights")) == {*METHODS, "quant_method"}


@pytest.mark.parametrize("scheme", ["s3", "hf", "gs", "az", "abfs", "https", "http", "file"])
def test_every_scheme_that_is_listed_is_known(scheme: str) -> None:
    from medusa_runtime.storage.base import STORES

    assert f"`{scheme}://" in (DOCS / "storage.md").read_text()
    assert scheme in STORES


def test_words_of_the_glossary_stand_once() -> None:
    words = re.findall(r"(?m)^- \*\*(.+?)\*\*:", (DOCS / "glossary.md").read_text())
    assert len(words) == len(set(words)) > 30
