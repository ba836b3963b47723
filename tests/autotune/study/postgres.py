"""A PostgreSQL server for tests: a real one, run by an unprivileged user, in a folder that is thrown away."""

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Self

USER = "tuner"
PLACES = ("/usr/lib/postgresql", "/usr/local", "/opt/homebrew", "/usr")


def find_binaries() -> Path | None:
    """The folder with ``initdb`` and ``pg_ctl`` of the newest version, None where it isn't installed."""
    if (found := shutil.which("initdb")) is not None:
        return Path(found).resolve().parent
    folders = [path.parent for place in PLACES for path in Path(place).glob("*/bin/initdb")]
    return max(
        folders,
        key=lambda folder: [int(part) for part in folder.parent.name.split(".") if part.isdigit()],
        default=None,
    )


class PostgresServer:
    """A server that can be stopped and started again.

    Args:
        binaries: Where ``initdb`` lies.
        folder: For its data; made, and given to the user that runs it.
    """

    def __init__(self, binaries: Path, folder: Path) -> None:
        self._binaries = binaries
        self._folder = folder
        self._data = folder / "data"
        folder.mkdir(parents=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        if os.getuid() == 0:  # the server refuses to run as root
            nobody = pwd.getpwnam("nobody")
            os.chown(folder, nobody.pw_uid, nobody.pw_gid)
        self._run("initdb", "-D", str(self._data), "-U", USER, "-A", "trust", "-E", "UTF8", "--no-sync")

    @classmethod
    def in_temporary_folder(cls, binaries: Path) -> Self:
        """A server whose folder every user may reach (those of pytest are private)."""
        parent = Path(tempfile.mkdtemp(prefix="paretune-postgres-"))
        parent.chmod(0o755)
        return cls(binaries, parent / "server")

    def remove(self) -> None:
        """Stop it and remove its folder."""
        self.stop()
        shutil.rmtree(self._folder.parent, ignore_errors=True)

    def start(self) -> None:
        """Start it and wait until it answers."""
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories='' -c fsync=off"
        log = str(self._folder / "log")
        self._run("pg_ctl", "-D", str(self._data), "-w", "-t", "60", "-l", log, "-o", options, "start")

    def stop(self, mode: str = "immediate") -> None:
        """Stop it; ``immediate`` is what a power cut looks like to its clients."""
        self._run("pg_ctl", "-D", str(self._data), "-w", "-m", mode, "stop")

    def url(self, database: str = "postgres") -> str:
        """Address of a database of it."""
        return f"postgresql://{USER}@127.0.0.1:{self.port}/{database}"

    def create(self, database: str) -> str:
        """A new database; its address."""
        self._run("createdb", "-h", "127.0.0.1", "-p", str(self.port), "-U", USER, database)
        return self.url(database)

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [str(self._binaries / program), *arguments],
            check=True,
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=_unprivileged(),
        )


def _unprivileged() -> Callable[[], None] | None:
    if os.getuid() != 0:
        return None
    nobody = pwd.getpwnam("nobody")

    def drop() -> None:
        os.setgid(nobody.pw_gid)
        os.setuid(nobody.pw_uid)

    return drop
