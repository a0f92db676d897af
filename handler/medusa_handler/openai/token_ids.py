"""Token ids in answers, and prompts that are cut to a number of tokens, as in vLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from medusa_runtime.engine.serving.cut import Cut
from medusa_runtime.errors import RequestError

from .body import parameters
from .body.parameters import Body

if TYPE_CHECKING:
    from ..service import Service

Prompt = str | tuple[int, ...]


class TokenIds(NamedTuple):
    """The token ids in an answer.

    ``returned`` adds those of the answer, and of ``prompts``, one for each choice. ``as_tokens`` shows tokens as
    ``token_id:7`` in log-probabilities.
    """

    returned: bool = False
    as_tokens: bool = False
    prompts: Sequence[Sequence[int]] = ()

    @classmethod
    def parse(cls, body: Body) -> TokenIds:
        """Read what a body asks for. Raises ApiError 400."""
        return cls(parameters.flag(body, "return_token_ids"), parameters.flag(body, "return_tokens_as_token_ids"))

    def of_prompts(self, prompts: Sequence[Prompt], choices: int) -> TokenIds:
        """Return the same with the ids of ``prompts``, each for so many choices."""
        if not self.returned:
            return self
        return self._replace(prompts=[list(map(int, prompt)) for prompt in prompts for _ in range(choices)])


NO_TOKEN_IDS = TokenIds()


def prepared(
    service: Service,
    body: Body,
    prompts: Sequence[Prompt],
    *,
    add_special_tokens: bool,
    is_disconnected: Callable[[], bool],
    field: str = "prompt",
) -> list[Prompt]:
    """Return the prompts, cut if the body asks for that, and as token ids if its answer has these.

    Raises ApiError, and RequestError, which names the body's ``field``.
    """
    most, side = parameters.truncation(body)
    if most is None and not parameters.flag(body, "return_token_ids"):
        return list(prompts)
    engine, context = service.engine, service.model.wait_info(is_disconnected).max_model_len
    assert engine is not None
    if most is not None:
        most = context - 1 if most == -1 else min(most, context)  # -1 leaves room for an answer
    cut = Cut(most, left=side != "right")
    found: list[Prompt] = []
    try:
        for prompt in prompts:
            if isinstance(prompt, str):
                found.append(tuple(engine.tokenize(prompt, add_special_tokens, most=most, left=cut.left)))
            else:
                found.append(tuple(cut.ids(list(prompt))))
    except RequestError as error:
        error.param = field
        raise
    return found


__all__ = ["NO_TOKEN_IDS", "Prompt", "TokenIds", "prepared"]
