"""A Flower deployment on this machine: SuperLink and SuperNodes as processes on loopback, with TLS and node keys.

Certificates, keys and all that Flower writes are in a folder of its own.
"""

import contextlib
import datetime
import ipaddress
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
PEM, PRIVATE = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def _write_key(key, path: Path) -> None:
    path.write_bytes(key.private_bytes(PEM, PRIVATE, serialization.NoEncryption()))
    path.chmod(0o600)


def certificates(folder: Path) -> None:
    """ca.crt, and server.crt and server.key for 127.0.0.1."""

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    def signed(subject: str, key, issuer: str, by, ca: bool):
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(name(subject))
            .issuer_name(name(issuer))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=2))
            .add_extension(x509.BasicConstraints(ca, None), True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(by.public_key()), False)
        )
        if not ca:
            names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), False)
        else:
            usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
            builder = builder.add_extension(usage, True)
        return builder.sign(by, hashes.SHA256())

    ca, server = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    (folder / "ca.crt").write_bytes(signed("fastfact test CA", ca, "fastfact test CA", ca, True).public_bytes(PEM))
    (folder / "server.crt").write_bytes(signed("127.0.0.1", server, "fastfact test CA", ca, False).public_bytes(PEM))
    _write_key(server, folder / "server.key")


class Counter:
    """A port that passes everything on to another, and counts the bytes each way."""

    def __init__(self, port: int):
        self.target, self.up, self.down = port, 0, 0
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self.socket.accept()
                there = socket.create_connection(("127.0.0.1", self.target))
                for way in (("up", here, there), ("down", there, here)):
                    threading.Thread(target=self._pass, args=way, daemon=True).start()

    def _pass(self, way: str, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                setattr(self, way, getattr(self, way) + len(data))
                sink.sendall(data)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.socket.close()


class Deployment:
    """folder: new. `nodes`: name → its clients, as --node-config has them ("0,1,2"). Nodes reach the SuperLink through
    `counter`."""

    def __init__(self, folder: Path, nodes: dict[str, str], path: Sequence[Path] = ()):
        self.folder, self.nodes = folder, nodes
        folder.mkdir(parents=True)
        certificates(folder)
        self.port = free_port()
        python_path = os.pathsep.join(map(str, [ROOT, *path]))
        self.environment = {
            **os.environ,
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": python_path,
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_HOME": str(folder / "home"),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "NO_PROXY": "127.0.0.1,localhost",
        }
        self.processes: dict[str, subprocess.Popen] = {}
        self.logs: dict[str, Path] = {}
        (folder / "home").mkdir()
        (folder / "home" / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\n'
            f'root-certificates = "{folder / "ca.crt"}"\n'
        )

    def _start(self, name: str, command: Sequence[str], **environment: str) -> None:
        self.logs[name] = self.folder / f"{name}.log"
        with open(self.logs[name], "ab") as out:
            # A group of its own: what it starts is ended with it.
            self.processes[name] = subprocess.Popen(
                command,
                env=self.environment | environment,
                cwd=self.folder,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def start_link(self) -> None:
        f = self.folder
        command = ["flower-superlink", "--host", "127.0.0.1", "--port", str(self.port), "--enable-supernode-auth"]
        command += ["--ssl-ca-certfile", str(f / "ca.crt"), "--ssl-certfile", str(f / "server.crt")]
        command += ["--ssl-keyfile", str(f / "server.key"), "--disable-runtime-dependency-installation"]
        self._start("superlink", command)
        self._await_port("superlink", self.port)
        self.counter = Counter(self.port)

    def _await_port(self, name: str, port: int, seconds: float = 120) -> None:
        until = time.monotonic() + seconds
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return
            if self.processes[name].poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{name} does not answer:\n{self.log(name)[-3000:]}")
            time.sleep(0.2)

    def flwr(self, *arguments: str, timeout: float = 120) -> str:
        done = subprocess.run(
            ["flwr", *arguments], env=self.environment, cwd=self.folder, capture_output=True, text=True, timeout=timeout
        )
        if done.returncode:
            raise RuntimeError(f"flwr {' '.join(arguments)}: {done.stdout}\n{done.stderr}")
        return done.stdout

    def make_key(self, name: str) -> Path:
        """A key pair for a SuperNode; its public half."""
        key = ec.generate_private_key(ec.SECP384R1())
        path = self.folder / f"{name}.key"
        path.write_bytes(key.private_bytes(PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()))
        path.chmod(0o600)
        public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        path.with_suffix(".pub").write_bytes(public)
        return path.with_suffix(".pub")

    def register(self, name: str) -> None:
        """Make a key pair for a SuperNode, and tell the SuperLink."""
        self.flwr("supernode", "register", str(self.make_key(name)), "here")

    def start_node(
        self, name: str, *, state: bool = True, key: bool = True, ca: bool = True, **environment: str
    ) -> None:
        config = f'clients="{self.nodes[name]}"'
        if state:
            config += f' state="{self.folder / "state"}"'
        command = ["flower-supernode", "--superlink", f"127.0.0.1:{self.counter.port}", "--port", str(free_port())]
        command += ["--node-config", config]
        if ca:
            command += ["--root-certificates", str(self.folder / "ca.crt")]
        if key:
            command += ["--auth-supernode-private-key", str(self.folder / f"{name}.key")]
        self._start(name, command, **environment)

    def start(self) -> None:
        self.start_link()
        for name in self.nodes:
            self.register(name)
            self.start_node(name)

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """End a process and what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.processes[name].pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.processes[name].wait(10)

    def log(self, name: str) -> str:
        return re.sub(r"\x1b\[[0-9;]*m", "", self.logs[name].read_text(errors="replace"))

    def run(self, project: Path, **config) -> str:
        """Start a run of a project; its number. config: what --run-config says."""
        copy = self.folder / f"project-{len(list(self.folder.glob('project-*')))}"
        shutil.copytree(project, copy)
        text = " ".join(f"{name}={json.dumps(value)}" for name, value in config.items())
        out = self.flwr("run", str(copy), "here", "--run-config", text, "--format", "json")
        answer = json.loads(out[out.index("{") :])
        if not answer.get("run-id"):
            raise RuntimeError(f"flwr run: {out}")
        return str(answer["run-id"])

    def status(self, run: str) -> str:
        out = self.flwr("list", "here", "--run-id", run, "--format", "json")
        return json.loads(out[out.index("{") :])["runs"][0]["status"]

    def wait(self, run: str, seconds: float = 600) -> str:
        """The status of a run that has ended."""
        until = time.monotonic() + seconds
        # Its log, for Flower's command line is a process that takes as long as a small round.
        while f"of run {run}" not in "".join(re.findall(r"Finished task \d+ (.*)", self.log("superlink"))):
            if time.monotonic() > until:
                raise RuntimeError(f"run {run} is {self.status(run)}:\n{self.log('superlink')[-4000:]}")
            time.sleep(1)
        status = self.status(run)
        return status

    def server_log(self, run: str) -> str:
        """What the ServerApp of a run has written."""
        return re.sub(r"\x1b\[[0-9;]*m", "", self.flwr("log", run, "here", "--show"))

    def stop(self) -> None:
        for name in self.processes:
            self.kill(name, signal.SIGTERM)
        for name in self.processes:
            self.kill(name)
        if hasattr(self, "counter"):
            self.counter.close()


@contextlib.contextmanager
def deployed(folder: Path, nodes: dict[str, str], path: Sequence[Path] = ()) -> Iterator[Deployment]:
    """A deployment that is up, with all its nodes; ended with the block."""
    one = Deployment(folder, nodes, path)
    try:
        one.start()
        yield one
    finally:
        one.stop()
