"""PyTorch's libuv store server, until stdin ends. argv[1]: "inet" or "default"."""
import datetime
import os
import resource
import socket
import sys

import torch
import torch.distributed as dist

hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
port, options = 0, {}
if sys.argv[1] == "inet":
    # An IPv4 socket of our own: PyTorch's looks up the name of every client and may stall.
    listener = socket.socket(socket.AF_INET)
    listener.bind(("127.0.0.1", 0))
    listener.listen(65535)
    port = listener.getsockname()[1]
    options = {"master_listen_fd": os.dup(listener.fileno())}
store = dist.TCPStore(
    "127.0.0.1",
    port,
    None,
    True,
    datetime.timedelta(seconds=300),
    wait_for_workers=False,
    use_libuv=True,
    **options,
)
print(f"listening on 127.0.0.1:{store.port} PyTorch {torch.__version__}", flush=True)
sys.stdin.read()
