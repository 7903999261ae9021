"""A client that holds leases and a grant, says so, and then does what it is told.

    holder.py ADDRESS wait|exec|fork|child

`exec` becomes another program, `fork` leaves a forked child behind and waits, `child` leaves a
program behind that inherits whatever descriptors are not closed on exec.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from told_blocks import spec_of

from kvstore import Client, chain_keys

LEASES, SLOTS = 5, 6


def main() -> None:
    """Hold, say `leased slots pid-left-behind`, go on."""
    address, then = sys.argv[1:3]
    client = Client(address, name="holder")
    space = client.open_space(spec_of())
    keys = chain_keys(range(32), 4)
    assert client.attachment.wait_active(60)
    leases = [space.acquire(keys).result(60) for _ in range(LEASES)]
    grant = space.reserve(SLOTS, deadline_s=10.0).result(60)
    space.get(keys)
    left = 0
    if then == "fork":
        left = os.fork()
        if not left:
            time.sleep(600)
            os._exit(0)
    elif then == "child":
        sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
        left = subprocess.Popen(sleep, close_fds=False, stdout=subprocess.DEVNULL).pid
    print(leases[0].blocks, len(grant.slots), left, flush=True)
    if then == "exec":
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)"])
    time.sleep(600)


if __name__ == "__main__":
    main()
