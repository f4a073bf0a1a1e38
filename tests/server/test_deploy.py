"""What is installed around a server fits it: the unit of systemd, the probe of the image, nginx."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from repository import ROOT

from hypocenter.cli.app import app
from hypocenter.server.serve import ServerConfig

UNIT = ROOT / "deploy" / "hypocenter.service"
PAGE = (ROOT / "docs" / "production.md").read_text()


def unit() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[method-assign,assignment]
    parser.read_string(UNIT.read_text().replace("\\\n", " "))
    return parser["Service"]


def test_the_unit_drains_reloads_and_gives_the_time_that_this_takes() -> None:
    service = unit()
    assert service["KillMode"] == "mixed"
    assert service["ExecReload"] == "/bin/kill -HUP $MAINPID"
    program, *words = shlex.split(service["ExecStart"])
    assert program.endswith("/hypo")
    grace = float(words[words.index("--grace") + 1])
    assert grace == ServerConfig.grace_seconds
    assert grace + 10 < int(service["TimeoutStopSec"]) <= grace + 30
    command, bound, _ = app.parse_args(words, print_error=False, exit_on_error=False)
    assert command.__name__ == "serve"
    assert bound.arguments["server"].api_key_file == "/etc/hypocenter/keys"
    written = (bound.arguments["server"].bundles, service["Environment"])
    assert written[0].startswith(f"/var/lib/{service['StateDirectory']}/")
    assert "MemoryDenyWriteExecute" not in service  # it makes machine code


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd")
def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / "hypocenter.service"
    copy.write_text(UNIT.read_text().replace("/opt/hypocenter/bin/hypo", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", copy], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_probe_of_the_image_tells_a_server_that_is_well_from_others() -> None:
    found = re.findall(r"^HEALTHCHECK .*\\\n +(\[.*\])$", (ROOT / "Dockerfile").read_text(), re.M)
    assert len(found) == 2, "each image has one"
    assert len(set(found)) == 1
    [_, flag, code] = json.loads(found[0].removeprefix("CMD "))
    statuses = [200, 503]

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(statuses.pop(0) if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *words: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        here = code.replace("127.0.0.1:8080", f"127.0.0.1:{server.server_port}")
        codes = [
            subprocess.run([sys.executable, flag, here], stderr=subprocess.DEVNULL).returncode
            for _ in range(2)
        ]
        server.shutdown()
    assert codes == [0, 1]


@pytest.mark.skipif(shutil.which("nginx") is None, reason="there is no nginx")
def test_nginx_reads_what_the_page_has_for_it(tmp_path: Path) -> None:
    [block] = re.findall(r"^```nginx\n(.*?)^```", PAGE, re.S | re.M)
    tls = ROOT / "tests/fixtures/tls/one"
    block = re.sub(r"/etc/hypocenter/cert\.(pem|key)", rf"{tls}.\1", block)
    config = tmp_path / "nginx.conf"
    config.write_text(
        f"pid {tmp_path}/pid;\nerror_log {tmp_path}/error;\nevents {{}}\n"
        f"http {{\naccess_log off;\n{block}}}\n"
    )
    done = subprocess.run(
        ["nginx", "-t", "-c", config], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_events_of_the_page_are_those_that_are_told() -> None:
    told = set()
    for path in (ROOT / "src/hypocenter").rglob("*.py"):
        told |= set(re.findall(r"\btell\(\s*(?:logging\.\w+|level),\s*\"(\w+)\"", path.read_text()))
    told |= {"request", "log_lines_lost"}
    table = re.search(r"^\| event \|.*?(?=^$)", PAGE, re.S | re.M)
    assert table
    first = [line.split("|")[1] for line in table[0].splitlines()[2:]]
    named = {name for cell in first for name in re.findall(r"`(\w+)`", cell)}
    assert named <= told, named - told
