"""One of two members of a world that meets in a FileStore.

    python filestore.py PATH first|second

The other member is another run of this script, or `cargo run -p phalanx-store --example
filestore_peer PATH second|first`, which makes the same calls in the same order. Prints `ok ROLE`
and exits with 0 if every value was as expected; the member that leaves last removes the file.
"""

import datetime
import sys

import torch.distributed as dist

ROLES = ("first", "second")
ROUNDS = 200


def main(path, role):
    other = ROLES[1 - ROLES.index(role)]
    store = dist.FileStore(path, len(ROLES))
    store.set_timeout(datetime.timedelta(seconds=60))

    def meet(name):
        store.barrier(f"meet/{name}", len(ROLES))

    def expect(what, got, wanted):
        assert got == wanted, f"{role}: {what} is {got!r}, expected {wanted!r}"

    meet("start")
    store.set(f"from/{role}", f"greetings, {role}")
    store.wait([f"from/{other}"])
    expect("greeting", store.get(f"from/{other}"), f"greetings, {other}".encode())

    for _ in range(ROUNDS):
        store.add("sum", 1)
    meet("sum")
    expect("sum", store.get("sum"), str(2 * ROUNDS).encode())

    # Every piece differs: PyTorch drops what it appends to a key that holds just the same bytes.
    for i in range(ROUNDS):
        store.append("log", f"{role} {i},")
    meet("log")
    pieces = [f"{name} {i}" for name in ROLES for i in range(ROUNDS)]
    expect("log", sorted(store.get("log").decode().split(",")), sorted([*pieces, ""]))

    leader = store.compare_set("leader", "", role)
    meet("leader")
    expect("leader", store.get("leader"), leader)
    expect("refused", store.compare_set("leader", "nobody", role), leader)
    expect("missing", store.compare_set("missing", "expected", role), b"expected")

    # A lock made of compare_set and delete_key guards a counter that is not updated atomically.
    store.compare_set("turns", "", "0")
    for _ in range(ROUNDS // 4):
        while store.compare_set("lock", "", role) != role.encode():
            pass
        store.set("turns", str(int(store.get("turns")) + 1))
        store.delete_key("lock")
    meet("turns")
    expect("turns", store.get("turns"), str(2 * (ROUNDS // 4)).encode())

    if role == "first":
        assert store.delete_key("from/second")
    meet("deleted")
    expect("deleted", store.check(["from/second"]), False)
    expect("kept", store.check(["from/first", "sum"]), True)

    store.multi_set([f"a/{role}", f"b/{role}"], ["1", ""])
    expect("pair", store.multi_get([f"b/{other}", f"a/{other}"]), [b"", b"1"])

    # The second counts the first one's answer too; PyTorch counts its own refcount key.
    meet("count")
    if role == "first":
        store.set("count", str(store.num_keys() - 1))
        store.wait(["counted"])
    else:
        count = int(store.get("count"))
        expect("count", store.num_keys() - 2, count)
        store.set("counted", "")

    # A Rust member uses queues in the meantime, in records that mean nothing here.
    meet("queues")
    expect("sum", store.get("sum"), str(2 * ROUNDS).encode())
    meet("end")
    del store
    print(f"ok {role}")


if __name__ == "__main__":
    main(*sys.argv[1:])
