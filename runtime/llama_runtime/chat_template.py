"""Chat templates: sandboxed Jinja that renders what `transformers` renders.

A template comes with a model and is not trusted. The sandbox keeps it from Python's internals and
from the messages; the text it makes is bounded. The time that it takes is not: a template of nested
loops can keep one thread busy. Importing this module imports Jinja, so do it only to render.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils
from jinja2.exceptions import SecurityError

from llama_artifacts.errors import InputError, TokenizerError

MAX_OUTPUT_LEN = 1 << 24
"""Characters that a template may make: far more than any model's context."""

_MAX_MESSAGE_LEN = 500
_MAX_POWER_BITS = 1 << 12


def render_chat_template(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    special_tokens: Mapping[str, str],
    add_generation_prompt: bool = True,
    where: object = None,
) -> str:
    """Renders the messages; `special_tokens` become variables such as `bos_token`.

    As in `transformers`, the keys of a message whose value is None are left out.

    Raises:
        InputError: the messages are not a list of objects of plain data.
        TokenizerError: the template is not valid Jinja, failed, called `raise_exception`, or tried
            what the sandbox forbids; `where` is the error's place.
    """
    variables = {
        **special_tokens,
        "messages": _plain_messages(messages),
        "tools": None,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }
    # A template is a program: it can raise anything, and none of it is a fault of this package.
    try:
        return _render_bounded(_compile(template), variables)
    except Exception as error:
        raise _template_error(error, where) from error


def _render_bounded(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    pieces = []
    total_len = 0
    for piece in template.generate(**variables):
        total_len += len(piece)
        if total_len > MAX_OUTPUT_LEN:
            raise OverflowError(f"more than {MAX_OUTPUT_LEN} characters of output")
        pieces.append(piece)
    return "".join(pieces)


@lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment.from_string(template)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, with products and powers that cannot fill the memory in one step."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        is_too_large = _is_large_power if operator == "**" else _is_large_product
        if is_too_large(left, right):
            raise OverflowError(f"the result of `{operator}` is too large")
        return super().call_binop(context, operator, left, right)


def _is_large_product(left: Any, right: Any) -> bool:
    sized, count = (left, right) if isinstance(right, int) else (right, left)
    if not isinstance(sized, (str, list, tuple)) or not isinstance(count, int):
        return False
    return len(sized) * count > MAX_OUTPUT_LEN


def _is_large_power(left: Any, right: Any) -> bool:
    if not isinstance(left, int) or not isinstance(right, int):
        return False
    return left.bit_length() * right > _MAX_POWER_BITS


class _GenerationTag(jinja2.ext.Extension):
    """Accepts `{% generation %}`, which marks the assistant's words for training, as a block."""

    tags = {"generation"}  # noqa: RUF012 - declared so by Jinja

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # As a call block: names that are set inside do not leave it, as in `transformers`.
        call = self.call_method("_same_text")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _same_text(self, caller: jinja2.runtime.Macro) -> str:
        return caller()


class _Dict:
    """The template's `dict`: callable, but without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """The template's `namespace`: names with a leading underscore are refused."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no `self`: a template may store that name
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_attribute(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"namespace attribute {name!r} is unsafe")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class _RefusalError(jinja2.TemplateError):
    """The template called `raise_exception`."""


def _raise_exception(message: object) -> None:
    raise _RefusalError(str(message))


def _template_error(error: Exception, where: object) -> TokenizerError:
    text = str(error)
    text = text if len(text) <= _MAX_MESSAGE_LEN else text[:_MAX_MESSAGE_LEN] + "..."
    if isinstance(error, _RefusalError):
        return TokenizerError(
            f"the chat template refuses these messages: {text}",
            where=where,
            hint="check the roles of the messages and their order",
        )
    line = f" in line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
    return TokenizerError(
        f"the chat template failed{line}: {type(error).__name__}: {text}",
        where=where,
        hint="use another chat template, or a prompt without one (--no-chat)",
    )


def _plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies the messages out of plain types, so that the template meets no other object."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise _message_error("messages", "a list", messages)
    if not messages:
        raise _message_error("messages", "at least one message", messages)
    plain = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise _message_error(where, "an object", message)
        given = {key: value for key, value in message.items() if value is not None}
        plain.append(_plain(given, where))
    return plain


def _plain(value: Any, where: str) -> Any:
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key, where): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    # A subclass may carry methods, and its own idea of how to convert.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    raise _message_error(where, "text, a number, a list or an object", value)


def _message_error(where: str, expected: str, got: object) -> InputError:
    shown = "none" if got == [] or got == () else type(got).__name__
    return InputError(
        f"expected {expected}, got {shown}",
        where=where,
        hint='write messages as [{"role": "user", "content": "..."}]',
    )
