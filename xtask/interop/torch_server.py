"""A real PyTorch store server; prints its port and serves until its input ends.

usage: torch_server.py libuv|legacy
"""

import os
import socket
import sys
from datetime import timedelta

import torch.distributed as dist

# An IPv4 socket of our own: on its default one the server looks up every client's name.
listener = socket.socket(socket.AF_INET)
listener.bind(("127.0.0.1", 0))
listener.listen(1024)
port = listener.getsockname()[1]
store = dist.TCPStore(
    "127.0.0.1",
    port,
    None,
    True,
    timedelta(seconds=300),
    wait_for_workers=False,
    use_libuv=sys.argv[1] == "libuv",
    master_listen_fd=os.dup(listener.fileno()),
)
print(f"listening on 127.0.0.1:{port}", flush=True)
sys.stdin.read()
