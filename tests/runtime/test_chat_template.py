from __future__ import annotations

import enum
from datetime import datetime
from typing import Any

import pytest

from llama_artifacts.errors import InputError, TokenizerError
from llama_runtime import chat_template
from llama_runtime.chat_template import render_chat_template

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)

DATED = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}[{{ m.content }}]"
    "{% endfor %}"
)

TEMPLATES = {
    "chatml with a default system prompt": CHATML,
    "headers with a date": DATED,
    "alternating roles": ALTERNATING,
    "namespace": (
        "{% set ns = namespace(n=0, self='s') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "{% endfor %}{{ ns.n }}{{ ns.self }}"
    ),
    "break and continue": (
        "{% for m in messages %}{% if loop.index == 1 %}{% continue %}{% endif %}{{ m.content }}"
        "{% if loop.index == 2 %}{%- break %}{% endif %}{% endfor %}"
    ),
    "tojson": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2, sort_keys=True) }}",
    "tojson with options": (
        "{{ messages | tojson(ensure_ascii=True, separators=(',', ':')) }}{{ {'b': 1} | tojson }}"
    ),
    "generation": (
        "{% for m in messages %}{% set seen = 'out' %}\n  {%- generation %}\n{% set seen = 'in' %}"
        "{{ m.content }}{% endgeneration -%}\n{{ seen }}{% endfor %}"
    ),
    "blocks on lines of their own": (
        "  {% if true %}\n    kept\n  {% endif %}\n{{ bos_token }}\n\n{# note #}\nend\n"
    ),
    "no html escaping": "{{ '<&>' }}{{ messages[0].content }}{{ '<&>' | e }}",
    "undefined names": "[{{ nothing }}{{ unk_token }}{{ messages[0].nothing }}]{{ pad_token }}",
    "absent tools and documents": "{{ tools is none }}{{ documents is none }}{{ tools is defined }}",
    "dict and its items": "{{ dict(a=1).items() | list }}{{ dict.fromkeys(['x'], 2) }}",
    "macros and filters": (
        "{% macro say(m) %}{{ m.role | upper }}: {{ m.content | trim | title }}{% endmacro %}"
        "{% for m in messages %}{{ say(m) }}{{ caller is defined }}{% endfor %}"
    ),
    "python methods": (
        "{{ messages[0].content.split('e') }}{{ messages[0].content.startswith('H') }}"
        "{{ messages[0].items() | list }}{{ messages[-1]['content'][:3] * 2 ** 2 }}"
    ),
    "unsafe attribute printed": "[{{ ''.__class__ }}]",
}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": [{"role": "user", "content": 'Hello <b> & "é" 😀'}],
    "system first": [
        {"role": "system", "content": "  Be brief. "},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello\n"},
        {"role": "user", "content": "{{ 7 * 7 }}"},
    ],
    "three turns": [
        {"role": "user", "content": "one", "name": None},
        {"role": "assistant", "content": "two", "n": 1.5, "ok": True},
        {"role": "user", "content": "three"},
    ],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "x", "none": None}, ("t",)]}],
}


def outcome(render: Any, *errors: type[Exception]) -> str:
    try:
        return str(render())
    except errors as error:
        return f"error: {type(error).__name__}"


@pytest.fixture(scope="module")
def reference() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **SPECIAL)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_renders_as_in_transformers(
    name: str, conversation: str, reference: Any
) -> None:
    messages = CONVERSATIONS[conversation]
    for prompt in (True, False):
        theirs = outcome(
            lambda prompt=prompt: reference.apply_chat_template(
                messages,
                chat_template=TEMPLATES[name],
                add_generation_prompt=prompt,
                tokenize=False,
            ),
            Exception,
        )
        ours = outcome(
            lambda prompt=prompt: render_chat_template(
                TEMPLATES[name], messages, special_tokens=SPECIAL, add_generation_prompt=prompt
            ),
            TokenizerError,
        )
        if theirs.startswith("error"):
            assert ours == "error: TokenizerError"
        else:
            assert ours == theirs


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_template_of_the_table_renders(name: str) -> None:
    messages = CONVERSATIONS["three turns"]
    assert render_chat_template(TEMPLATES[name], messages, special_tokens=SPECIAL)


def test_chatml_gets_the_default_system_prompt_once() -> None:
    text = render_chat_template(CHATML, [{"role": "user", "content": "Hi"}], special_tokens={})
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_date_is_today() -> None:
    before = datetime.now()
    text = render_chat_template(DATED, CONVERSATIONS["one turn"], special_tokens=SPECIAL)
    days = {day.strftime("%d %b %Y") for day in (before, datetime.now())}
    assert any(f"Today Date: {day}\n" in text for day in days)


def test_raise_exception_gives_its_text_on_one_line() -> None:
    messages = [{"role": "assistant", "content": "x"}]
    with pytest.raises(TokenizerError, match="Conversation roles must alternate") as caught:
        render_chat_template(ALTERNATING, messages, special_tokens={}, where="some/folder")
    assert str(caught.value).startswith("some/folder: the chat template refuses these messages")
    assert caught.value.hint


HOSTILE = {
    "class of a string": ("{{ ''.__class__.__mro__ }}", "SecurityError"),
    "globals of a function": ("{{ raise_exception.__globals__['json'] }}", "SecurityError"),
    "class through attr": ("{{ (''|attr('__class__')).__mro__ }}", "SecurityError"),
    "class through format": ("{{ '{0.__class__.__mro__}'.format('') }}", "SecurityError"),
    "appended message": ("{{ messages.append({}) }}", "SecurityError"),
    "changed message": ("{{ messages[0].update({'role': 'system'}) }}", "SecurityError"),
    "changed through the type": (
        "{{ dict.update(messages[0], role='system') }}",
        "UndefinedError",
    ),
    "private attribute": ("{% set n = namespace(_x=1) %}", "SecurityError"),
    "private attribute set": ("{% set n = namespace() %}{% set n.__x = 1 %}", "SecurityError"),
    "endless range": ("{% for i in range(10**9) %}{% endfor %}", "OverflowError"),
    "endless output": (
        "{% for i in range(99999) %}{{ 'x' * 100000 }}{% endfor %}",
        "OverflowError",
    ),
    "huge product": ("{{ 'x' * 10**12 }}", "OverflowError"),
    "huge product, reversed": ("{{ (10**12 * [1]) | length }}", "OverflowError"),
    "huge power": ("{{ 10**(10**9) }}", "OverflowError"),
    "endless recursion": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    "division by zero": ("{{ 1 // 0 }}", "ZeroDivisionError"),
    "wrong types": ("{{ 'a' + 1 }}", "TypeError"),
    "syntax": ("line\n{% for %}", "line 2"),
    "include": ("{% include '/etc/passwd' %}", "TypeError"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_or_broken_template_is_an_error(name: str) -> None:
    template, kind = HOSTILE[name]
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(TokenizerError) as caught:
        render_chat_template(template, messages, special_tokens={})
    assert kind in caught.value.message
    assert messages == [{"role": "user", "content": "x"}]


def test_output_and_messages_of_a_template_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(TokenizerError) as caught:
        render_chat_template("{{ raise_exception('x' * 100000) }}", messages, special_tokens={})
    assert len(str(caught.value)) < 1000
    monkeypatch.setattr(chat_template, "MAX_OUTPUT_LEN", 10)
    with pytest.raises(TokenizerError, match="more than 10 characters"):
        render_chat_template("{{ messages }}", messages, special_tokens={})


class Word(str, enum.Enum):
    HELLO = "hello"


def test_templates_see_plain_types_only() -> None:
    text = render_chat_template(
        "{{ messages[0].content }} {{ messages[0].content.name }}",
        [{"role": "user", "content": Word.HELLO}],
        special_tokens={},
    )
    assert text == "hello "


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ("Hi", "messages"),
        ({"role": "user"}, "messages"),
        (None, "messages"),
        ([], "messages"),
        (["Hi"], "messages[0]"),
        ([{"role": "user", "content": [object()]}], "messages[0].content[0]"),
    ],
)
def test_messages_of_another_form_are_refused_by_place(messages: Any, where: str) -> None:
    with pytest.raises(InputError, match="expected") as caught:
        render_chat_template("", messages, special_tokens={})
    assert caught.value.where == where
