"""Messages -> the text that a model was taught to answer: the template of its tokenizer. PURE."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from isotron.core.errors import refuse
from isotron.tokenizers.base import need_library

PLAIN = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class Template:
    """A Jinja template with the names that Hugging Face templates use; run in a sandbox."""

    def __init__(self, source: str, tokens: dict[str, str], where: str = "--chat-template") -> None:
        library = need_library("jinja2", "a chat template")
        sandbox = need_library("jinja2.sandbox", "a chat template")
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.error: type[Exception] = library.TemplateError
        self._tokens = tokens
        try:
            self._template = environment.from_string(source)
        except library.TemplateError as error:
            raise refuse(where, f"the template cannot be read: {error}", "a Jinja template") from error

    def text(self, messages: Sequence[dict[str, Any]]) -> str:
        """The prompt for these messages; raises ValueError where the template does not take them."""
        plain = [{**m, "content": _joined(m["content"])} for m in messages]
        try:
            return str(self._template.render(messages=plain, add_generation_prompt=True, **self._tokens))
        except (self.error, TypeError, ValueError) as error:
            raise ValueError(f"the chat template does not take these messages: {error}") from error


def _raise(message: str) -> None:
    raise ValueError(message)


def _joined(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def find_template(given: str, directories: Iterable[Path]) -> Template:
    """The template of a file, else the first that stands beside a tokenizer, else one line per message."""
    if given:
        path = Path(given)
        if not path.is_file():
            raise refuse(f"--chat-template {given}", "there is no such file", "--chat-template with a Jinja file")
        return Template(path.read_text(encoding="utf-8"), {})
    for directory in directories:
        values = _values(directory / "tokenizer_config.json")
        tokens = {name: _spelled(values.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        own = directory / "chat_template.jinja"
        source = own.read_text(encoding="utf-8") if own.is_file() else _default(values.get("chat_template"))
        if source:
            return Template(source, tokens, str(directory))
    return Template(PLAIN, {})


def _values(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else {}


def _spelled(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")


def _default(template: Any) -> str:
    """One template, or the one called default of several."""
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        return str(named.get("default") or "")
    return str(template or "")
