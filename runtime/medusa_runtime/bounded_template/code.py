"""The compiler of templates, which has the compiled code call the limits at the places that Jinja has no hook for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame


class LimitedCode(CodeGenerator):
    """Compiles a template with calls of LimitedContext at the places that Jinja has no hook for."""

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:
        for output in node.find_all(nodes.Output):  # constants are a part of the template, and need no check
            output.nodes = [_as_data(part) for part in output.nodes]
        repeated: Iterator[Any] = node.find_all((nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block))
        self._repeated = {id(part.body): _own_text(part.body) for part in repeated}
        super().visit_Template(node, frame)

    def blockvisit(self, nodes: Any, frame: Frame) -> None:
        if (characters := self._repeated.get(id(nodes))) is not None:
            self.writeline(f"context.step({characters})")
        super().blockvisit(nodes, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("context.joined((markup_join if context.eval_ctx.autoescape else str_join), (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        constant = isinstance(node.expr, nodes.Const) or all(isinstance(op.expr, nodes.Const) for op in node.ops)
        self.write("(")
        self._visit_compared(node.expr, frame, constant)
        for op in node.ops:
            self.write(f" {_COMPARISONS[op.op]} ")
            self._visit_compared(op.expr, frame, constant)
        self.write(")")

    def _visit_compared(self, node: nodes.Expr, frame: Frame, constant: bool) -> None:
        if constant or isinstance(node, nodes.Const):
            self.visit(node, frame)
        else:
            self._visit_in("followed", node, frame, self.visit)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx != "load" or all(isinstance(item, nodes.Const) for item in node.items):
            super().visit_Tuple(node, frame)
        else:  # a tuple can be a key, and its hash follows all items
            self._visit_in("followed", node, frame, super().visit_Tuple)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, nodes.Slice):
            self._visit_in("made", node, frame, super().visit_Getitem)
        else:
            super().visit_Getitem(node, frame)

    def _visit_in(self, method: str, node: Any, frame: Frame, visit: Callable[[Any, Frame], Any]) -> None:
        self.write(f"context.{method}(")
        visit(node, frame)
        self.write(")")


_COMPARISONS = {
    "eq": "==", "ne": "!=", "gt": ">", "gteq": ">=", "lt": "<", "lteq": "<=", "in": "in", "notin": "not in",
}  # fmt: skip


def _as_data(part: nodes.Expr) -> nodes.Expr:
    if isinstance(part, nodes.Const) and isinstance(part.value, str):
        return nodes.TemplateData(part.value, lineno=part.lineno)
    return part


def _own_text(body: list[nodes.Node]) -> int:
    """Return the characters of the template that a body writes itself, without those of loops in it."""
    parts = chain.from_iterable(
        (node,) if isinstance(node, nodes.TemplateData) else _without_loops(node) for node in body
    )
    return sum(len(part.data) for part in parts)


def _without_loops(node: nodes.Node) -> Iterator[nodes.TemplateData]:
    for child in node.iter_child_nodes():
        if isinstance(child, nodes.TemplateData):
            yield child
        elif not isinstance(child, nodes.For):
            yield from _without_loops(child)
