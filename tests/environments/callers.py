"""Agents that speak HTTP, by their functions' names."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import threading
import time
from urllib.parse import urlsplit

from environments.talkers import multiply


def post(url, body, path="/chat/completions", headers=()):
    """Send JSON; return status and JSON, or the lines of a stream."""
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=60)
    if path.startswith("/inference"):
        target = place.path.removesuffix("/v1") + path
    else:
        target = place.path + path
    sent = body if isinstance(body, bytes) else json.dumps(body)
    connection.request("POST", target, sent, {"Content-Type": "application/json", **dict(headers)})
    response = connection.getresponse()
    content = response.read().decode()
    connection.close()
    if response.headers["Content-Type"] == "text/event-stream":
        return response.status, content.split("\n\n")[:-1]
    return response.status, json.loads(content)


def asked(url, messages, **more):
    """The model's message, and why it ended."""
    status, body = post(url, {"model": "policy", "messages": messages, **more})
    if status != 200:
        raise RuntimeError(body["error"]["message"])
    choice = body["choices"][0]
    return choice["message"], choice["finish_reason"]


def calculator(row, url, seed):
    """Run the model's calls until it answers without one."""
    messages = list(row["prompt"])
    while True:
        message, reason = asked(url, messages, tools=row["schemas"])
        messages.append({**message, "refusal": None, "annotations": []})
        if reason != "tool_calls":
            return {"right": float("12" in (message["content"] or ""))}
        for call in message["tool_calls"]:
            arguments = json.loads(call["function"]["arguments"])
            answer = {"role": "tool", "name": "multiply", "tool_call_id": call["id"]}
            messages.append({**answer, "content": str(multiply(**arguments))})


def echo(row, url, seed):
    """Two turns; what it says back is what the model said."""
    messages = list(row["prompt"])
    for _ in range(2):
        message, _ = asked(url, messages)
        messages += [message, {"role": "user", "content": "again"}]
    return 1.0


def capitals(row, url, seed):
    """Three turns, as the environment of this name."""
    messages = list(row["prompt"])
    rewards = 0.0
    for turn in range(3):
        message, reason = asked(url, messages)
        text = message["content"] or ""
        rewards += sum(letter.isupper() for letter in text) / max(len(text), 1)
        if turn == 2 or reason == "length":
            break
        messages += [message, {"role": "user", "content": f"{row['answer']}!"}]
    return {"capitals": rewards}


def forgets(row, url, seed):
    """Two requests, the second without what was said before."""
    said = [
        asked(url, [{"role": "user", "content": row["prompt"][0]["content"] + end}])[0]
        for end in ("", "?")
    ]
    text = "".join(message["content"] or "" for message in said)
    return sum(letter.isupper() for letter in text) / max(len(text), 1)


async def waits(row, url, seed):
    """A coroutine, with one request."""
    message, _ = await asyncio.to_thread(asked, url, row["prompt"])
    return len(message["content"] or "")


def in_ids(row, url, seed):
    """Two turns in token ids."""
    ids = row["ids"]
    for _ in range(2):
        status, body = post(
            url,
            {"model": "policy", "token_ids": ids, "sampling_params": {"logprobs": 1}},
            "/inference/v1/generate",
        )
        assert status == 200, body
        choice = body["choices"][0]
        names = [entry["token"] for entry in choice["logprobs"]["content"]]
        assert names == [f"token_id:{token}" for token in choice["token_ids"]]
        ids = ids + choice["token_ids"] + row["more"]
    return 0.5


def parts(row, url, seed):
    """Three parts ask at the same time, in an order that the row says; then the first asks again."""
    said = {}

    def ask(name, seconds):
        time.sleep(seconds)
        said[name] = asked(url, [{"role": "user", "content": name}])[0]

    threads = [threading.Thread(target=ask, args=each) for each in row["order"]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    again = [{"role": "user", "content": "a"}, said["a"], {"role": "user", "content": "more"}]
    asked(url, again)
    return 1.0


def streams(row, url, seed):
    """Read a stream."""
    body = {"model": "policy", "messages": row["prompt"], "stream": True}
    status, events = post(url, body | {"stream_options": {"include_usage": True}})
    assert status == 200
    assert events[-1] == "data: [DONE]"
    values = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    text = "".join(e["choices"][0]["delta"].get("content") or "" for e in values[:-1])
    assert values[-1]["usage"]["completion_tokens"] > 0
    return {"letters": float(len(text))}


def repeats(row, url, seed):
    """Send a request twice, the second time as a client does that has waited too long."""
    body = {"model": "policy", "messages": row["prompt"]}
    answers = []

    def ask(count):
        answers.append(post(url, body, headers={"x-stainless-retry-count": count}.items()))

    first = threading.Thread(target=ask, args=("0",))
    first.start()
    time.sleep(0.05)
    ask("1")
    first.join()
    assert answers[0] == answers[1]
    return 1.0


def wrong(row, url, seed):
    """Do what the row's first message says."""
    what = row["prompt"][0]["content"]
    if what == "nothing":
        return 1.0
    message, _ = asked(url, row["prompt"])
    what = "die" if message["content"] == "die" else what
    if what == "raise":
        raise ValueError("no idea")
    if what == "exit":
        raise SystemExit
    if what == "die":
        os._exit(3)
    if what == "hang":
        time.sleep(1000)
    if what == "text":
        return "good"
    if what == "forever":
        while True:
            asked(url, row["prompt"])
    return None


def refused(row, url, seed):
    """Send what the gateway cannot answer, then something that it can."""
    prompt = row["prompt"]
    bodies = [
        {"messages": prompt, "n": 2},
        {"messages": prompt, "stop": "x"},
        {"messages": prompt, "max_tokens": 0},
        {"messages": []},
        {"messages": ["hello"]},
        {"messages": prompt, "stop_token_ids": 3},
        {"messages": prompt, "temperature": "hot"},
        {"messages": prompt, "tools": [{"type": "function"}]},
        {"messages": [{"role": "user", "content": 3}]},
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        {"messages": [{"role": "user"}] * 2},
        {"messages": [{"role": "user", "content": "x" * 5000}]},
        [],
        b"no json",
    ]
    statuses = [post(url, body)[0] for body in bodies]
    for ids in (["a"], [10**9], [-1], []):
        statuses += [post(url, {"token_ids": ids}, "/inference/v1/generate")[0]]
    statuses.append(post(url, {}, "/nowhere")[0])
    statuses.append(post(url.replace("/s/", "/s/x"), {"messages": prompt})[0])
    assert statuses == [400] * 18 + [404, 410], statuses
    message, reason = asked(url, prompt, max_tokens=2, temperature=0.3)
    assert reason == "length"
    assert len(message["content"]) <= 2
    return 1.0


def two_arguments(row, url):
    """Lacks a parameter."""
