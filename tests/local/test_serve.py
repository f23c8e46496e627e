"""The server over real sockets: the official client, streams, limits, keys, clients that leave, a crowd, the page."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import time
from pathlib import Path

import openai
import pytest

from isotron.commands.serve import run as serve_command
from isotron.core.errors import Refused
from isotron.inference.config import Ending, Sampling, Wish
from isotron.serve.chat import Template, find_template
from isotron.serve.listen import bind
from isotron.serve.main import _name_of, check_cache
from isotron.serve.worker import wish_from, wish_to
from tests.generation import make_model
from tests.serving import Letters, call, crowd, listening, make_server, metrics, settled


@pytest.fixture(scope="module")
def address():
    with listening(make_server()) as found:
        yield found


@pytest.fixture(scope="module")
def client(address):
    with openai.OpenAI(base_url=f"http://{address[0]}:{address[1]}/v1", api_key="x", max_retries=0) as found:
        yield found


def test_completions_are_the_engines_own(client):
    from isotron.inference.engine import Engine

    engine = Engine(make_model("llama", "float32"), Letters())
    out = client.completions.create(model="tiny", prompt=["ab", "cde"], max_tokens=6, temperature=0, logprobs=2)
    right = engine.generate([[97, 98], [99, 100, 101]], 6)
    for choice, tokens, logprobs in zip(out.choices, right.tokens, right.logprobs, strict=True):
        kept = [t for t in tokens if t != 0]
        assert choice.text == Letters().decode(kept) and choice.finish_reason in ("length", "stop")
        assert choice.logprobs.token_logprobs == pytest.approx(logprobs, abs=1e-5)
    assert out.usage.prompt_tokens == 5 and out.usage.completion_tokens == sum(map(len, right.tokens))
    one = client.completions.create(model="tiny", prompt=[97, 98], max_tokens=6, temperature=0)
    assert one.choices[0].text == out.choices[0].text


def test_a_stream_is_the_whole_answer(client):
    options = {"model": "tiny", "max_tokens": 12, "temperature": 1.0, "seed": 5, "stop": ["zq"]}
    whole = client.completions.create(prompt="hello", n=2, **options)
    parts = {0: "", 1: ""}
    ends = {}
    for event in client.completions.create(prompt="hello", n=2, stream=True, **options):
        for choice in event.choices:
            parts[choice.index] += choice.text
            ends[choice.index] = choice.finish_reason or ends.get(choice.index)
    assert [parts[c.index] for c in whole.choices] == [c.text for c in whole.choices]
    assert [ends[c.index] for c in whole.choices] == [c.finish_reason for c in whole.choices]


def test_chat(client):
    messages = [{"role": "user", "content": "hi"}]
    options = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 5}
    whole = client.chat.completions.create(**options, logprobs=True, top_logprobs=2)
    (choice,) = whole.choices
    assert choice.message.role == "assistant" and len(choice.logprobs.content[0].top_logprobs) == 2
    text = (
        client.completions.create(model="tiny", prompt="user: hi\nassistant:", temperature=0, max_tokens=5)
        .choices[0]
        .text
    )
    assert choice.message.content == text
    stream = client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    events = list(stream)
    assert "".join(e.choices[0].delta.content or "" for e in events if e.choices) == text
    assert events[-1].usage.completion_tokens == whole.usage.completion_tokens
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert client.chat.completions.create(**{**options, "messages": parts}).choices[0].message.content == text


def test_answers_that_follow_a_grammar(client):
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"enum": ["b", "c"]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    bias = {str(ord(c)): -100 for c in " \n\t\r"}
    reply = client.completions.create(
        model="tiny", prompt="x", max_tokens=20, seed=1, logit_bias=bias, extra_body={"response_format": form}
    )
    assert json.loads(reply.choices[0].text)["a"] in ("b", "c")


def test_models_health_metrics_and_page(client, address):
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert call(address, "GET", "/health") == (200, {"status": "ok"})
    assert metrics(address)["isotron_cache_pages"] == 40
    status, page = call(address, "GET", "/")
    assert status == 200 and "/v1/chat/completions" in page and '"tiny"' in page


def test_megatrons_body(address):
    body = {"prompts": ["ab", "c"], "tokens_to_generate": 4, "top_k": 1, "logprobs": True}
    status, reply = call(address, "PUT", "/api", body)
    assert status == 200 and [t[: len(p)] for t, p in zip(reply["text"], ("ab", "c"), strict=True)] == ["ab", "c"]
    assert len(reply["segments"]) == 2 and all(reply["logprobs"])
    for wrong in ({"prompts": []}, {"prompts": ["a"], "tokens_to_generate": 0}, {"prompts": ["a"], "top_p": 2}, {}):
        assert call(address, "PUT", "/api", wrong)[0] == 400


@pytest.mark.parametrize(
    "body, status, words",
    [
        ({"prompt": "x" * 30, "max_tokens": 30}, 400, ["max_position_embeddings is 32"]),
        ({"prompt": "x", "n": 9}, 400, ["limit is 8"]),
        ({"prompt": "x" * 5000}, 413, ["4096 bytes"]),
        ({"prompt": "x", "temperature": -1}, 400, ["temperature", "0 or more"]),
        ({"prompt": "x", "top_p": "a"}, 400, ["top_p must be a number"]),
        ({"prompt": "x", "echo": True}, 400, ["echo must be false"]),
        ({"prompt": "x", "temprature": 1}, 400, ["temprature is not a field"]),
        ({"prompt": "x", "model": "gpt-4"}, 404, ["there is no model gpt-4", "tiny"]),
        ({"prompt": [5, 500]}, 400, ["token 500"]),
        ({"prompt": []}, 400, ["prompt is empty"]),
        ({"prompt": [[1], {}]}, 400, ["prompt must be"]),
        ({}, 400, ["prompt is missing"]),
        ({"prompt": "x", "logit_bias": {"a": 1}}, 400, ["logit_bias"]),
        (b'{"prompt": "x", "logit_bias": {"5": 1%s}}' % (b"0" * 400), 400, ["logit_bias must be"]),
        (b'{"prompt": "x", "temperature": 1%s}' % (b"0" * 400), 400, ["temperature must be a number"]),
        (b'{"prompt": "x", "temperature": 1e400}', 400, ["temperature must be a number"]),
        (b'{"prompt": "x", "n": 1%s}' % (b"0" * 4000), 400, ["limit is 8"]),
        ({"prompt": "x", "stream": True, "stream_options": {"include_usage": "x"}}, 400, ["stream_options must be"]),
        ({"prompt": "x", "response_format": {"type": "xml"}}, 400, ["response_format"]),
        ({"prompt": "x", "response_format": {"type": "regex", "regex": "("}}, 400, ["cannot be read"]),
        ({"prompt": "x", "best_of": 3, "stream": True}, 400, ["best_of"]),
        (b"{", 400, ["not JSON"]),
        (b"[" * 3000, 400, ["not JSON"]),
        (b"3", 400, ["must be a JSON object"]),
    ],
    ids=lambda v: str(v)[:40],
)
def test_what_is_wrong_is_said_and_nobody_else_notices(address, body, status, words):
    found, reply = call(address, "POST", "/v1/completions", body)
    assert found == status and all(word in reply["error"]["message"] for word in words)
    assert call(address, "POST", "/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200


def test_messages_that_are_none(address):
    for body in ({}, {"messages": []}, {"messages": [{"role": "user"}]}, {"messages": [1]},
                 {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}):  # fmt: skip
        assert call(address, "POST", "/v1/chat/completions", body)[0] == 400


def test_a_refusal_names_the_field_that_was_sent(address):
    body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 21}
    found, reply = call(address, "POST", "/v1/chat/completions", body)
    assert found == 400 and reply["error"]["param"] == "top_logprobs" and "0 to 20" in reply["error"]["message"]


def test_a_client_that_leaves_within_its_body_is_no_failure_of_the_server(address, caplog):
    cancelled, failed = (f'isotron_requests_total{{outcome="{name}"}}' for name in ("cancelled", "failed"))
    before = metrics(address)
    with socket.create_connection(address) as torn:
        torn.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    deadline = time.monotonic() + 10
    while metrics(address)[cancelled] == before[cancelled] and time.monotonic() < deadline:
        time.sleep(0.01)
    after = metrics(address)
    assert after[cancelled] == before[cancelled] + 1 and after[failed] == before[failed]
    assert "ClientDisconnect" not in caplog.text
    assert call(address, "POST", "/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200


def test_a_client_that_leaves_frees_its_rows(address):
    before = metrics(address)['isotron_requests_total{outcome="cancelled"}']
    body = json.dumps({"prompt": "abc", "max_tokens": 28, "ignore_eos": True, "n": 8, "stream": True})
    connection = http.client.HTTPConnection(*address, timeout=10)
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    connection.getresponse().read(50)
    connection.close()
    settled(address)
    assert metrics(address)['isotron_requests_total{outcome="cancelled"}'] in (before, before + 1)


def test_a_crowd_leaves_no_trace(address):
    crowd(address, 8, 0.5)
    before = settled(address)
    found = crowd(address, 16, 2.0)
    after = settled(address)
    assert not found["wrong"], found["wrong"][:5]
    assert found["good"] > 10 and found["dropped"] and found["broken"]
    assert after["isotron_rows_waiting"] == after["isotron_rows_running"] == 0
    assert after["process_resident_memory_bytes"] < before["process_resident_memory_bytes"] + 60e6
    assert call(address, "GET", "/health")[0] == 200


def test_too_many_at_once_are_turned_away():
    server = make_server()
    server.worker.pending = 64
    with listening(server) as address:
        status, reply = call(address, "POST", "/v1/completions", {"prompt": "x"})
        assert status == 429 and "limit is 64" in reply["error"]["message"]
        server.worker.pending = 0
        assert call(address, "POST", "/v1/completions", {"prompt": "x"})[0] == 200


def test_an_api_key():
    with listening(make_server(api_key="secret")) as address:
        assert call(address, "POST", "/v1/completions", {"prompt": "x"})[0] == 401
        assert call(address, "GET", "/v1/models", None, Authorization="Bearer wrong")[0] == 401
        assert call(address, "POST", "/v1/completions", {"prompt": "x"}, Authorization="Bearer secret")[0] == 200
        assert call(address, "GET", "/health")[0] == 200


def test_an_engine_that_fails_is_said():
    server = make_server()

    def fail():
        raise RuntimeError("on purpose")

    server.engine.step = fail
    with listening(server) as address:
        status, reply = call(address, "POST", "/v1/completions", {"prompt": "x"})
        assert status == 503 and reply["error"]["message"] == "the engine has stopped"  # the model is not at fault
        assert reply["error"]["type"] == "server_error"
        time.sleep(0.1)
        status, reply = call(address, "GET", "/health")
        assert status == 503 and "on purpose" in reply["reason"]
        assert call(address, "POST", "/v1/completions", {"prompt": "x"})[0] == 503


def test_wishes_survive_json():
    wish = Wish(
        Sampling(0.5, logit_bias=((3, 1.0),)), Ending(4, frozenset({7, 5}), ("a",)), 2, 3, True, 1, ("regex", "a")
    )
    assert wish_from(json.loads(json.dumps(wish_to(wish)))) == wish


def test_templates(tmp_path):
    config = {"chat_template": "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
              "bos_token": {"content": "<s>"}}  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = find_template("", [tmp_path / "none", tmp_path])
    assert template.text([{"role": "user", "content": "a"}]) == "<s><user>a"
    assert find_template("", []).text([{"role": "user", "content": "a"}]) == "user: a\nassistant:"
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    with pytest.raises(ValueError, match="no"):
        find_template("", [tmp_path]).text([])
    with pytest.raises(Refused, match="cannot be read"):
        Template("{% for", {})
    with pytest.raises(Refused, match="no such file"):
        find_template("gone.jinja", [])


def test_options_that_cannot_be():
    with pytest.raises(Refused) as refusal:
        serve_command(["--load", "/nowhere", "--host", "0.0.0.0", "--port", "70000", "--max-body-bytes", "0",
                       "--max-waiting", "-1", "--speculate", "draft"])  # fmt: skip
    for word in ("--host 0.0.0.0 without an API key", "--port 70000", "--max-body-bytes 0", "--max-waiting -1",
                 "--draft", "/nowhere"):  # fmt: skip
        assert word in str(refusal.value)


def test_the_page_in_a_browser(address):
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as p:
        try:
            browser = p.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"no Chromium for playwright: {str(error).splitlines()[0]}")
        page = browser.new_page()
        page.goto(f"http://{address[0]}:{address[1]}/")
        page.fill("#t", "0")
        page.fill("#n", "6")
        page.fill("#q", "hi")
        page.click("#send")
        page.wait_for_selector(".assistant[data-done]", timeout=10000)
        reply = call(address, "POST", "/v1/chat/completions", {
            "messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 6,
        })[1]["choices"][0]["message"]["content"]  # fmt: skip
        assert page.text_content(".assistant") == reply
        browser.close()


@pytest.mark.parametrize(("step", "name"), [("runs/first/step_00000009", "first"), ("models/my_model", "my_model")])
def test_the_name_of_a_model_is_that_of_its_run(step: str, name: str) -> None:
    assert _name_of(Path(step)) == name


def test_a_place_is_taken_before_anything_is_loaded():
    (first,) = bind("127.0.0.1", 0)
    first.listen()
    port = first.getsockname()[1]
    for host, at, case in (("127.0.0.1", port, "in use"), ("no.such.host.invalid", 0, "it is no address"),
                           ("203.0.113.7", 0, "assign requested address")):  # fmt: skip
        with pytest.raises(Refused, match=f"(?s){case}.*try:    --host 127.0.0.1"):
            bind(host, at)
    first.close()
    both = bind("localhost", 0)
    assert len({s.getsockname()[1] for s in both}) == 1
    for sock in both:
        sock.close()


def test_a_cache_beyond_the_memory_is_refused():
    engine = make_server().engine
    check_cache(engine, 160)
    with pytest.raises(Refused, match=r"(?s)--cache-tokens 99999999999999\n.*try:    --cache-tokens \d+"):
        check_cache(engine, 99999999999999)
