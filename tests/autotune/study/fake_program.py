"""A user's program for tests: writes a result to $AUTOTUNE_RESULT, or ends as asked."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

result = Path(os.environ["AUTOTUNE_RESULT"])
how, *rest = sys.argv[1:]
if how == "ok":
    x = float(rest[0])
    result.write_text(json.dumps({"loss": (x - 0.3) ** 2, "seed": int(rest[1]) if len(rest) > 1 else 0}))
elif how == "text":
    result.write_text(rest[0])
elif how == "raise":
    raise {"value": ValueError, "memory": MemoryError}[rest[0]]("as asked")
elif how == "fail":
    result.write_text(json.dumps({"failure": rest[0], "detail": "loss\nof 12"}))
    sys.exit(3)
elif how == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
elif how == "signal":
    os.kill(os.getpid(), signal.Signals[rest[0]])
elif how == "memory":
    held = bytearray(400 * 2**20)
    time.sleep(60)
elif how == "children":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    result.write_text('{"loss": 1}')
elif how == "hang":
    time.sleep(60)
elif how == "where":
    result.write_text(json.dumps({"loss": 1.0}))
    print(os.getcwd(), *rest)
