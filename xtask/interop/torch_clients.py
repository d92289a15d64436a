"""PyTorch's TCPStore client on a Phalanx server: every call, timeouts, cancels, 32 clients at once.

usage: torch_clients.py HOST PORT
"""

import sys
import threading
import time
from datetime import timedelta

import torch.distributed as dist

HOST, PORT = sys.argv[1], int(sys.argv[2])
CASES = []


def case(body):
    CASES.append(body)
    return body


def connect(seconds=30, **kwargs):
    return dist.TCPStore(HOST, PORT, timeout=timedelta(seconds=seconds), **kwargs)


def raises(kind, text, body):
    try:
        body()
    except kind as err:
        assert text in str(err), f"{text!r} is not in {err}"
        return
    raise AssertionError(f"no {kind.__name__}")


def after(seconds, body):
    timer = threading.Timer(seconds, body)
    timer.start()
    return timer


@case
def set_get_add_append_delete():
    s = connect()
    s.set("k", "v1")
    assert s.get("k") == b"v1"
    s.set("empty", "")
    assert s.get("empty") == b""
    s.set("", "empty key")
    assert s.get("") == b"empty key"
    assert s.add("c", 5) == 5 and s.add("c", -7) == -2 and s.get("c") == b"-2"
    s.set("text", "41")
    assert s.add("text", 1) == 42
    s.append("ap", "ab")
    s.append("ap", "cd")
    assert s.get("ap") == b"abcd"
    assert s.delete_key("empty") and not s.delete_key("empty")
    s.set("big", b"x" * (8 << 20))
    assert len(s.get("big")) == 8 << 20


@case
def compare_set_table():
    s = connect()
    assert s.compare_set("cs", "", "init") == b"init"
    assert s.compare_set("cs", "bad", "z") == b"init"
    assert s.compare_set("cs", "init", "next") == b"next"
    assert s.compare_set("cs-missing", "exp", "z") == b"exp"
    assert not s.check(["cs-missing"])


@case
def compare_set_wakes_exactly_those_whose_key_exists():
    s, other = connect(), connect()
    after(0.2, lambda: other.compare_set("cs-wake", "no", "z"))
    raises(dist.DistStoreError, "wait timeout", lambda: s.wait(["cs-wake"], timedelta(seconds=0.6)))
    after(0.2, lambda: other.compare_set("cs-wake", "", "yes"))
    s.wait(["cs-wake"], timedelta(seconds=20))
    assert s.get("cs-wake") == b"yes"


@case
def check_wait_and_timeouts():
    s, other = connect(), connect()
    s.set("here", "1")
    assert s.check(["here"]) and not s.check(["here", "nope"]) and s.check([])
    s.wait(["here", "here"])
    s.wait([])
    after(0.2, lambda: other.set("late", "x"))
    s.wait(["here", "late"], timedelta(seconds=20))
    for _ in range(3):
        raises(
            dist.DistStoreError,
            "wait timeout after 100ms, keys: /never",
            lambda: s.wait(["never"], timedelta(seconds=0.1)),
        )
    s.set_timeout(timedelta(seconds=0.2))
    raises(dist.DistStoreError, "keys: /never", lambda: s.get("never"))
    assert s.get("here") == b"1", "in step after cancelled waits"


@case
def cancels_that_cross_the_wake_up():
    s, other = connect(), connect()
    for i in range(200):
        key = f"cross{i}"
        writer = after(0.002, lambda key=key: other.set(key, "v"))
        try:
            s.wait([key], timedelta(milliseconds=2))
        except dist.DistStoreError:
            pass
        writer.join()
        assert s.add(f"{key}/step", 1) == 1, "in step after a crossing"


@case
def multi_get_and_set():
    s = connect()
    s.multi_set(["m1", "m2"], ["one", "two!"])
    assert s.multi_get(["m2", "m1"]) == [b"two!", b"one"]
    assert s.multi_get([]) == []
    s.multi_set([], [])
    keys = [f"many{i}" for i in range(5000)]
    s.multi_set(keys, [str(i) for i in range(5000)])
    assert s.multi_get(keys)[4999] == b"4999"


@case
def num_keys_and_list_keys():
    s = connect()
    before = s.num_keys()
    s.set("one more", "")
    assert s.num_keys() == before + 1
    assert "one more" in s.list_keys()
    p = dist.PrefixStore("outer", dist.PrefixStore("inner", s))
    p.set("k", "v")
    assert s.get("inner/outer/k") == b"v"
    assert p.list_keys() == ["k"]


@case
def queues():
    s, other = connect(), connect()
    assert s.queue_len("q") == 0
    s.queue_push("q", "a")
    s.queue_push("q", "bb")
    assert s.queue_len("q") == 2 and s.check(["q"])
    assert s.queue_pop("q") == b"a" and s.queue_pop("q", False) == b"bb"
    raises(dist.QueueEmptyError, "empty", lambda: s.queue_pop("q", False))
    after(0.2, lambda: other.queue_push("q", "late"))
    assert s.queue_pop("q") == b"late"
    s.set_timeout(timedelta(seconds=0.2))
    raises(dist.DistStoreError, "keys: /q", lambda: s.queue_pop("q"))
    assert not s.delete_key("q")


@case
def barriers():
    s, other = connect(), connect()
    s.barrier("b1", 1)
    raises(
        dist.DistStoreError,
        "barrier timeout after 100ms, key: b2",
        lambda: s.barrier("b2", 2, timedelta(seconds=0.1)),
    )
    after(0.2, lambda: other.barrier("b3", 2))
    s.barrier("b3", 2)
    p, q = dist.PrefixStore("p", s), dist.PrefixStore("p", other)
    after(0.2, lambda: q.barrier("b4", 2))
    p.barrier("b4", 2)


@case
def a_refused_request_ends_one_client_only():
    s, other = connect(), connect()
    s.set("word", "not a number")
    raises(dist.DistNetworkError, "", lambda: s.add("word", 1))
    assert other.get("word") == b"not a number"
    clone = other.clone()
    assert clone.get("word") == b"not a number"


@case
def workers_register_as_with_pytorch():
    first = connect(world_size=2, wait_for_workers=True)
    second = connect(world_size=2, wait_for_workers=True)
    assert first.num_keys() == second.num_keys()


@case
def thirty_two_clients_at_once():
    failures, rounds, n = [], 20, 32

    def client(i):
        try:
            s = connect(seconds=60)
            for r in range(rounds):
                s.set(f"c{i}/{r}", f"{i}-{r}")
                assert s.get(f"c{(i + 1) % n}/{r}") == f"{(i + 1) % n}-{r}".encode()
                s.add(f"total{r}", 1)
                s.barrier(f"round{r}", n)
                assert s.add(f"total{r}", 0) == n
        except Exception as err:  # a thread's failure must reach the exit code
            failures.append((i, repr(err)))

    threads = [threading.Thread(target=client, args=(i,)) for i in range(n)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures, failures


for body in CASES:
    start = time.time()
    body()
    print(f"ok   {body.__name__} ({time.time() - start:.1f} s)", flush=True)
print(f"{len(CASES)} passed, 0 failed")
