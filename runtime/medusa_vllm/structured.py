"""vLLM's own structured outputs, for cores that start without a tokenizer. Their manager is made at the first use."""

from __future__ import annotations

import copy
import functools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from medusa_runtime.checkpoint.reader import SMALL_FILES
from medusa_runtime.engine.base import StructuredOutputs
from medusa_runtime.engine.serving.inbox import Inbox
from medusa_runtime.engine.structured.constraints import Constraints
from medusa_runtime.engine.structured.grammar import COMPILED, PARAM
from medusa_runtime.errors import EngineError, MedusaError, RequestError
from medusa_runtime.region.reader import Region

from .lean_imports import avoid_cache_folder, without_torch_compile
from .structural_tags import special_tokens, translate
from .weights.checkpoint_folder import CheckpointFolder

_BACKEND = "guidance"  # nothing to compile, so that a request does not wait for its grammar


def request_field(form: StructuredOutputs) -> dict[str, Any]:
    """Return a form as the one field that a request to vLLM has for its kind. With tags it is a structural tag."""
    if form.closing or form.header:
        return {"structural_tag": json.dumps({"type": "structural_tag", "format": _sequence(_with_tags(form))})}
    if form.kind == "json_schema":
        return {"json": form.text}
    return {form.kind: json.loads(form.text) if form.kind == "choice" else form.text}


def _with_tags(form: StructuredOutputs) -> list[dict[str, Any]]:
    """Return the parts of a structural tag: free text up to the closing tag, the header, and the form."""
    free = [*_string(form.opening), {"type": "any_text"}, *_string(form.closing)] if form.closing else []
    if form.opening:
        free = [{"type": "optional", "content": _sequence(free)}]
    return [*free, *_string(form.header), _content(form)]


def _content(form: StructuredOutputs) -> dict[str, Any]:
    if form.kind == "json_schema":
        return {"type": "json_schema", "json_schema": json.loads(form.text)}
    if form.kind == "regex":
        return {"type": "regex", "pattern": form.text}
    if form.kind == "grammar":
        return {"type": "grammar", "grammar": form.text}
    if form.kind == "choice":
        return {"type": "or", "elements": [_sequence(_string(each)) for each in json.loads(form.text)]}
    tagged = [
        _sequence([*_string(tag), {"type": "json_schema", "json_schema": schema}])
        for tag, schema in json.loads(form.text)
    ]
    return {"type": "or", "elements": tagged}


def _string(text: str) -> list[dict[str, Any]]:
    return [{"type": "const_string", "value": text}] if text else []


def _sequence(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "sequence", "elements": parts}


def vllm_params(form: StructuredOutputs) -> Any:
    """Return vLLM's parameters for a form."""
    from vllm.sampling_params import StructuredOutputsParams

    params = StructuredOutputsParams(**request_field(form))
    params._backend = _BACKEND
    return params


class TokenizerFolder:
    """The folder of an engine, with the checkpoint's configuration and, after the first ``path``, its tokenizer."""

    def __init__(self, region: Region) -> None:
        self.folder = CheckpointFolder(region)
        self._region = region
        self._lock = threading.Lock()
        self._has_tokenizer = False
        self._closed = False

    def path(self) -> Path:
        """Return the folder, with the tokenizer. Raises EngineError once closed: a thread that mounts may be late."""
        with self._lock:
            if self._closed:
                raise EngineError("the engine is stopping; try again")
            if not self._has_tokenizer:
                for name in SMALL_FILES:
                    if name != "config.json" and (data := self._region.file(name)) is not None:
                        (self.folder.path / name).write_bytes(data)
                self._has_tokenizer = True
            return self.folder.path

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self.folder.close()


class StructuredOutputManagers:
    """Gives cores vLLM's manager of structured outputs, which makes their masks, once a request needs it.

    Any thread but the engine's may call ``prepare`` and ``install``.
    """

    def __init__(
        self, region: Region, inbox: Inbox, files: TokenizerFolder, *, vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        self._region = region
        self._inbox = inbox
        self._files = files
        self._lock = threading.Lock()
        self._installed = False
        self._special_tokens = functools.cache(lambda: special_tokens(region.file("tokenizer.json")))
        self._trials = Constraints(
            lambda: region.file("tokenizer.json"), vocab_size=vocab_size, eos_token_ids=eos_token_ids, rows=1
        )

    def limit_grammars(self, backend: str) -> None:
        """Have every grammar, also of vLLM's own routes, tried within limits before vLLM takes it.

        vLLM compiles callers' grammars in this process, and a few hundred bytes can keep it busy for minutes. It also
        has xgrammar read each structural tag first, without limits, whatever the server's ``backend`` is.
        """
        from vllm.v1.structured_output import backend_guidance, backend_xgrammar

        backend_guidance.validate_guidance_grammar = self._validate
        self._translate_tags()
        guided = self._validate_for_xgrammar if backend == _BACKEND else _as_before
        _replace(backend_xgrammar, "validate_xgrammar_grammar", guided)

    def _translate_tags(self) -> None:
        """Have vLLM's backend take structural tags, which forms with tags become here, too."""
        from vllm.v1.structured_output import backend_guidance

        _replace(backend_guidance, "serialize_guidance_grammar", self._serialize)

    def _serialize(self, before: Callable[..., Any], kind: Any, spec: Any, *flags: Any, **named: Any) -> str:
        """Return the grammar of llguidance for a form, as vLLM's function ``before`` does, also for structural tags."""
        if kind.name != "STRUCTURAL_TAG":
            return str(before(kind, spec, *flags, **named))
        tokens = self._special_tokens()
        return translate(spec, lambda schema: str(before(type(kind).JSON, schema, *flags, **named)), tokens)

    def _validate_for_xgrammar(self, before: Callable[[Any], None], params: Any) -> None:
        """Try what vLLM would have xgrammar read. Raises ValueError, as vLLM does.

        A grammar in Lark is refused: vLLM would translate it without limits, to join it with the calls of tools.
        """
        from vllm.v1.structured_output.utils import grammar_is_likely_lark

        form = params.structured_outputs
        if form is not None and form.grammar and grammar_is_likely_lark(form.grammar):
            raise ValueError("expected a grammar in EBNF beside tools")
        self._validate(params)

    def _validate(self, params: Any, tokenizer: Any = None, wanted: Callable[[], bool] = lambda: True) -> None:
        """Replace vLLM's function of this name. Raises ValueError, as vLLM does, and EngineError."""
        from vllm.v1.structured_output import backend_guidance
        from vllm.v1.structured_output.backend_guidance import get_structured_output_key, serialize_guidance_grammar

        refusal = getattr(backend_guidance, "VLLMValidationError", ValueError)
        if params.structured_outputs is None:
            return
        try:
            grammar = serialize_guidance_grammar(*get_structured_output_key(params.structured_outputs))
        except (ValueError, KeyError, TypeError) as error:
            raise refusal(f"Invalid grammar specification: {error}") from error
        except RecursionError:
            raise refusal("Invalid grammar specification: it is nested too deeply") from None
        try:
            fault = self._trials.check(StructuredOutputs(COMPILED, str(grammar)), wanted)
        except RequestError as error:
            raise refusal(str(error)) from error
        if fault:
            raise refusal(f"Grammar error: {fault}")

    def close(self) -> None:
        self._trials.close()

    def install(self, core: Any) -> None:
        """Give a running core its manager, once. Raises RequestError without a tokenizer."""
        with self._lock:
            if not self._installed:
                with without_torch_compile(), avoid_cache_folder():
                    self._install(core)
                    self._translate_tags()
                self._installed = True

    def prepare(self, core: Any, form: StructuredOutputs, wanted: Callable[[], bool]) -> None:
        """Give a core its manager, and check a form. Raises RequestError for a form that cannot be enforced.

        ``wanted`` says whether the request still needs it: others may come first.
        """
        self.install(core)
        from vllm.sampling_params import SamplingParams

        try:
            self._validate(SamplingParams(structured_outputs=vllm_params(form)), wanted=wanted)
        except MedusaError:
            raise
        except Exception as error:  # the types of vLLM's errors differ between versions
            reason = " ".join(str(error).split())
            raise RequestError(f"{PARAM}: this {form.kind} cannot be used: {reason}", PARAM) from error

    def _install(self, core: Any) -> None:
        manager = self._manager(core)
        self._inbox.call(lambda: _set_manager(core, manager))

    def install_in(self, core: Any) -> None:
        """Give another core, which does not run yet, a manager if the first core has one."""
        with self._lock:
            if self._installed:
                with without_torch_compile(), avoid_cache_folder():
                    _set_manager(core, self._manager(core))

    def _manager(self, core: Any) -> Any:
        """Return a new manager. Reads the tokenizer, and imports the code that applies masks."""
        if self._region.file("tokenizer.json") is None:
            raise RequestError(
                f"{PARAM}: this checkpoint has no tokenizer.json, so its tokens have no text",
                PARAM,
            )
        import llguidance.hf
        import llguidance.torch  # noqa: F401 - at the first mask, these would hold up the engine
        import xgrammar  # noqa: F401
        from vllm.v1.structured_output import StructuredOutputManager

        try:
            path = str(self._files.path())
            config = copy.copy(core.vllm_config)
            config.model_config = copy.copy(config.model_config)
            config.model_config.skip_tokenizer_init = False
            config.model_config.tokenizer = path
            config.structured_outputs_config = copy.copy(config.structured_outputs_config)
            if config.structured_outputs_config.backend == "auto":
                config.structured_outputs_config.backend = _BACKEND
            return StructuredOutputManager(config)
        except MedusaError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise RequestError(f"{PARAM}: vLLM cannot use this checkpoint's tokenizer: {reason}", PARAM) from error


def _replace(module: Any, name: str, function: Callable[..., Any]) -> None:
    """Replace a function of vLLM's for this process, whatever replaced it before. ``function`` gets vLLM's own first.

    A function that this version of vLLM does not have is not added.
    """
    found = getattr(module, name, None)
    if found is not None:
        before = found.args[0] if isinstance(found, functools.partial) else found
        setattr(module, name, functools.partial(function, before))


def _as_before(before: Callable[..., Any], *arguments: Any) -> Any:
    return before(*arguments)


def _set_manager(core: Any, manager: Any) -> None:
    core.structured_output_manager = manager
    core.scheduler.structured_output_manager = manager
