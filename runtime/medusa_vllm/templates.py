"""Has chat templates rendered within limits wherever vLLM and transformers render them: by Jinja's sandbox."""

from __future__ import annotations

import importlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from medusa_runtime.bounded_template.renderer import TemplateRenderer


def limit_templates() -> TemplateRenderer:
    """Have vLLM and transformers render chat templates as ours are, within limits, from now on. Return what renders."""
    import jinja2.sandbox
    from medusa_runtime.bounded_template.renderer import RenderingError, template_renderer

    class Template(NamedTuple):
        environment: jinja2.Environment
        source: str

        def render(self, **values: Any) -> str:
            try:
                return template_renderer().render(self.source, values)
            except RenderingError as error:
                raise jinja2.TemplateError(f"the chat template {error}") from error

    class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(jinja2.sandbox.SandboxedEnvironment.default_binop_table)

        def parse(self, *arguments: Any, **options: Any) -> jinja2.nodes.Template:
            """Return a tree that can be searched for names. Jinja would compute its constants first."""
            tree = super().parse(*arguments, **options)
            volatile = jinja2.nodes.Keyword("volatile", jinja2.nodes.Const(True))
            tree.body.insert(0, jinja2.nodes.EvalContextModifier([volatile]))
            return tree

        def from_string(self, source: Any, *arguments: Any, **options: Any) -> Any:
            return Template(self, source)

    for name in ("jinja2.sandbox", "transformers.utils.chat_template_utils"):
        with suppress(ImportError):  # another version of transformers
            vars(importlib.import_module(name))["ImmutableSandboxedEnvironment"] = Environment
    template_renderer().start()
    return template_renderer()


__all__ = ["limit_templates"]
