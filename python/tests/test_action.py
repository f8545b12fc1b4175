# SPDX-License-Identifier: Apache-2.0
"""The GitHub Action for users: its files run as its steps run them, without GitHub."""

from __future__ import annotations

import http.server
import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

pytestmark = pytest.mark.quick

FOLDER = pathlib.Path(__file__).parents[2] / ".github" / "actions" / "judge"
#: Stands for isoshard: notes its words, writes its report, and ends with the code of --exit.
FAKE = """\
#!{python}
import json, os, pathlib, sys
words = sys.argv[1:]
with open(os.environ["NOTES"], "a") as notes:
    notes.write(json.dumps(words) + "\\n")
codes = [int(word.partition("=")[2]) for word in words if word.startswith("--exit=")]
code = codes[0] if codes else 0
pairs = zip(words, words[1:] + [""])
reports = [word[9:] or after for word, after in pairs if word.split("=")[0] == "--report"]
if reports and code < 2:
    report = pathlib.Path(reports[0])
    report.write_text("page")
    report.with_stem(report.stem + ".float64").write_text("page in float64")
print("CONFORMS  all" if code == 0 else "DIVERGES  a `first` | wrong tensor" if code == 1 else "?")
sys.exit(code)
"""


# -- action.yml ----------------------------------------------------------------------------------


def check_schema(file: pathlib.Path) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("check_jsonschema", reason="check-jsonschema is not installed")
    command = [sys.executable, "-m", "check_jsonschema"]
    command += ["--builtin-schema", "vendor.github-actions", str(file)]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_action_fits_the_schema() -> None:
    result = check_schema(FOLDER / "action.yml")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("    default:", "    defalt:"), ("  steps:", "  step:"), ("      run:", "      runs:")],
)
def test_a_wrong_key_is_found(tmp_path: pathlib.Path, right: str, wrong: str) -> None:
    text = (FOLDER / "action.yml").read_text(encoding="utf-8")
    assert right in text
    file = tmp_path / "action.yml"
    file.write_text(text.replace(right, wrong), encoding="utf-8")

    assert check_schema(file).returncode == 1


def test_no_shell_reads_an_expression() -> None:
    """What `${{ }}` expands to inside of run: would be code."""
    text = (FOLDER / "action.yml").read_text(encoding="utf-8")
    scripts = [line for line in text.splitlines() if line.strip().startswith("run:")]

    assert len(scripts) == 3
    assert not [line for line in scripts if "${{" in line or line.rstrip().endswith(("|", ">"))]


# -- steps ---------------------------------------------------------------------------------------


@dataclass
class Step:
    """What a step did."""

    code: int
    log: str
    page: str
    outputs: dict[str, str]
    calls: list[list[str]]


@dataclass
class Job:
    """Runs steps below a folder whose name must be quoted, and keeps their files there."""

    folder: pathlib.Path
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, name: str, inputs: Mapping[str, str], script: pathlib.Path = FOLDER) -> Step:
        files = {key: self.folder / key for key in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
        notes = self.folder / "notes"
        for file in (*files.values(), notes):
            file.write_text("", encoding="utf-8")
        kept = ("PATH", "HOME", "LANG", "LC_ALL")
        environment = {key: os.environ[key] for key in kept if key in os.environ}
        environment |= {key: str(file) for key, file in files.items()}
        environment |= {"RUNNER_TEMP": str(self.folder), "NOTES": str(notes)}
        environment |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUTF8": "1"}
        environment |= self.environment
        environment |= {f"INPUT_{key}": value for key, value in inputs.items()}
        result = subprocess.run(
            [sys.executable, str(script / f"{name}.py")],
            capture_output=True,
            text=True,
            env=environment,
            cwd=self.folder,
        )
        lines = files["GITHUB_OUTPUT"].read_text(encoding="utf-8").splitlines()
        return Step(
            result.returncode,
            result.stdout + result.stderr,
            files["GITHUB_STEP_SUMMARY"].read_text(encoding="utf-8"),
            dict(line.split("=", 1) for line in lines),
            [json.loads(line) for line in notes.read_text().splitlines()],
        )


@pytest.fixture
def job(tmp_path: pathlib.Path) -> Job:
    folder = tmp_path / "a 'quoted\" folder"
    folder.mkdir()
    return Job(folder)


@pytest.fixture
def judging(job: Job) -> Job:
    """A job with the fake isoshard in INPUT_SCRIPTS."""
    program = job.folder / "bin" / "isoshard"
    program.parent.mkdir()
    program.write_text(FAKE.format(python=sys.executable), encoding="utf-8")
    program.chmod(0o755)
    job.environment["INPUT_SCRIPTS"] = str(program.parent)
    return job


@pytest.mark.parametrize(
    ("codes", "worst"), [((0,), 0), ((0, 1, 0), 1), ((4, 0, 2), 4), ((1, 3, 2), 3), ((0, 2), 2)]
)
def test_all_commands_run_and_the_largest_exit_code_counts(
    judging: Job, codes: tuple[int, ...], worst: int
) -> None:
    lines = [f"judge --exit={code} -- torchrun --nproc-per-node 2 t.py" for code in codes]

    step = judging.run("judge", {"COMMANDS": "\n".join(["# a comment", "", *lines, ""])})

    assert step.code == worst, step.log
    assert step.outputs["exit-code"] == str(worst)
    assert [words[-6] for words in step.calls] == [f"--exit={code}" for code in codes]
    rows = [line for line in step.page.splitlines() if line.startswith(("| ✅", "| ❌"))]
    assert [int(row.split("|")[4]) for row in rows] == list(codes)


def test_each_command_gets_a_folder_and_a_report_of_its_own(judging: Job) -> None:
    step = judging.run("judge", {"COMMANDS": "judge -- a.sh --report x\ncompare b c"})

    assert step.code == 0, step.log
    reports = pathlib.Path(step.outputs["reports"])
    for number, words in enumerate(step.calls, 1):
        assert words[1::2][:2] == ["--output-dir", "--report"]
        assert words[4] == str(reports / f"{number:02}.html")
    assert len({words[2] for words in step.calls}) == 2
    assert [words[5:] for words in step.calls] == [["--", "a.sh", "--report", "x"], ["b", "c"]]
    names = ["01.float64.html", "01.html", "02.float64.html", "02.html"]
    assert sorted(path.name for path in reports.iterdir()) == names


def test_commands_without_reports_run_as_they_are(judging: Job) -> None:
    step = judging.run("judge", {"COMMANDS": "preflight --ranks 2"})

    assert step.calls == [["preflight", "--ranks", "2"]]


def test_words_with_spaces_and_quotes_stay_words(judging: Job) -> None:
    line = """judge --reference-command 'python a.py -n "b c"' -- "my script.sh" it\\'s $HOME `x`"""

    step = judging.run("judge", {"COMMANDS": line})

    (words,) = step.calls
    assert words[5:] == [
        "--reference-command",
        'python a.py -n "b c"',
        "--",
        "my script.sh",
        "it's",
        "$HOME",
        "`x`",
    ]


@pytest.mark.parametrize("option", ["--report 'my page.html'", "'--report=my page.html'"])
def test_a_report_of_the_user_is_kept_and_uploaded(judging: Job, option: str) -> None:
    step = judging.run("judge", {"COMMANDS": f"judge {option} --output-dir out -- a.sh"})

    (words,) = step.calls
    assert len([word for word in words if word.startswith("--report")]) == 1
    assert words.count("--output-dir") == 1 and "out" in words
    assert (judging.folder / "my page.html").read_text() == "page"
    reports = pathlib.Path(step.outputs["reports"])
    assert {path.name for path in reports.iterdir()} == {"01.html", "01.float64.html"}


def test_an_old_report_of_the_user_is_not_uploaded(judging: Job) -> None:
    (judging.folder / "x.html").write_text("old")

    step = judging.run("judge", {"COMMANDS": "judge --exit=4 --report x.html -- a.sh"})

    assert step.code == 4
    assert list(pathlib.Path(step.outputs["reports"]).iterdir()) == []


@pytest.mark.parametrize("commands", ["", " \n\t\n", "# judge -- a.sh"])
def test_no_command_is_wrong_usage(judging: Job, commands: str) -> None:
    step = judging.run("judge", {"COMMANDS": commands})

    assert (step.code, step.calls, step.outputs) == (2, [], {})
    assert step.log.startswith("::error ")


def test_a_line_that_no_shell_reads_is_wrong_usage_of_that_line_alone(judging: Job) -> None:
    step = judging.run("judge", {"COMMANDS": "judge -- 'a.sh\njudge -- b.sh"})

    assert step.code == 2
    assert [words[-1] for words in step.calls] == ["b.sh"]


def test_a_missing_program_is_a_failed_run(job: Job) -> None:
    job.environment["PATH"] = str(job.folder)

    step = job.run("judge", {"COMMANDS": "judge -- a.sh"})

    assert step.code == 4


def test_markdown_and_html_of_a_command_are_text(judging: Job) -> None:
    line = "judge --exit=1 -- 'a|b' '<img src=x>' '`c`' '@user' '*d*'"

    step = judging.run("judge", {"COMMANDS": line})

    (row,) = (line for line in step.page.splitlines() if line.startswith("| ❌"))
    assert row.count("|") == 6
    assert not set("<>`@*") & set(row.replace("<code>", "").replace("</code>", ""))


def test_a_summary_fits_into_a_comment(judging: Job) -> None:
    lines = ["judge --exit=1 -- " + "*" * 400] * 40

    step = judging.run("judge", {"COMMANDS": "\n".join(lines)})

    assert len(step.calls) == 40
    assert 10_000 < len(step.page) <= 60_000


# -- install -------------------------------------------------------------------------------------


@pytest.fixture
def installing(job: Job) -> Job:
    """A job whose pip notes its words, and fails for a name with `bad`."""
    pip = job.folder / "site" / "pip" / "__main__.py"
    pip.parent.mkdir(parents=True)
    (pip.parent / "__init__.py").write_text("")
    pip.write_text(
        "import json, os, sys\n"
        "with open(os.environ['NOTES'], 'a') as notes:\n"
        "    notes.write(json.dumps(sys.argv[1:]) + '\\n')\n"
        "sys.exit('bad' in sys.argv[-1])\n"
    )
    job.environment["PYTHONPATH"] = str(pip.parents[1])
    return job


@pytest.mark.parametrize(("wheel", "code"), [("isoshard==0.1", 0), ("a b.whl", 0), ("bad.whl", 4)])
def test_pip_installs_what_the_input_names(installing: Job, wheel: str, code: int) -> None:
    step = installing.run("install", {"WHEEL": wheel})

    assert step.code == code, step.log
    assert [words[-3:] for words in step.calls] == [["install", "--", wheel]]
    assert ("scripts" in step.outputs) == (code == 0)


@pytest.mark.parametrize(("body", "code"), [(': >"$2/isoshard-1.whl"', 0), ("exit 4", 4), ("", 4)])
def test_without_an_input_the_checkout_builds_the_wheel(
    installing: Job, body: str, code: int
) -> None:
    """The launcher of the checkout is a fake one here; the real one builds for minutes."""
    root = installing.folder / "checkout"
    action = root / ".github" / "actions" / "judge"
    shutil.copytree(FOLDER, action)
    launcher = root / "isoshard"
    launcher.write_text(f'#!/bin/sh\necho "$1 $ISOSHARD_PYTHON" >"$0.called"\n{body}\n')
    launcher.chmod(0o755)

    step = installing.run("install", {"WHEEL": ""}, action)

    assert step.code == code, step.log
    called = (root / "isoshard.called").read_text().split()
    assert called == ["wheel", sys.executable]
    names = [pathlib.Path(words[-1]).name for words in step.calls]
    assert names == (["isoshard-1.whl"] if code == 0 else [])


# -- comment -------------------------------------------------------------------------------------


class GitHub(http.server.ThreadingHTTPServer):
    """The comments of pull request 7 of owner/name. `status`, if set, answers every request."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.comments: list[dict[str, Any]] = []
        self.status = 0
        self.read_only = False
        self.calls: list[str] = []


class _Handler(http.server.BaseHTTPRequestHandler):
    server: GitHub

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def _answer(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _body(self) -> str:
        size = int(self.headers["Content-Length"])
        return str(json.loads(self.rfile.read(size))["body"])

    def _handle(self) -> None:
        server, (path, _, query) = self.server, self.path.partition("?")
        server.calls.append(self.command)
        text = self._body() if self.command != "GET" else ""
        rejected = server.status or (403 if server.read_only and self.command != "GET" else 0)
        if self.headers["Authorization"] != "Bearer secret":
            rejected = 401
        if rejected:
            self._answer(rejected, {"message": "Resource not accessible by integration"})
        elif self.command == "GET" and path == "/repos/owner/name/issues/7/comments":
            values = urllib.parse.parse_qs(query)
            size, page = int(values["per_page"][0]), int(values["page"][0])
            self._answer(200, server.comments[(page - 1) * size : page * size])
        elif self.command == "POST" and path == "/repos/owner/name/issues/7/comments":
            server.comments.append({"id": 100 + len(server.comments), "body": text})
            self._answer(201, server.comments[-1])
        elif self.command == "PATCH" and path.startswith("/repos/owner/name/issues/comments/"):
            number = int(path.rpartition("/")[2])
            (comment,) = (one for one in server.comments if one["id"] == number)
            comment["body"] = text
            self._answer(200, comment)
        else:
            self._answer(404, {"message": "Not Found"})

    do_GET = do_POST = do_PATCH = _handle


@pytest.fixture
def github() -> Iterator[GitHub]:
    server = GitHub()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def commenting(job: Job, github: GitHub) -> Job:
    event = job.folder / "event.json"
    event.write_text(json.dumps({"pull_request": {"number": 7, "head": {"sha": "abc"}}}))
    job.environment |= {
        "GITHUB_API_URL": f"http://127.0.0.1:{github.server_address[1]}",
        "GITHUB_EVENT_PATH": str(event),
        "GITHUB_REPOSITORY": "owner/name",
        "no_proxy": "*",
    }
    return job


def comment(job: Job, summary: str, **more: str) -> Step:
    file = job.folder / "summary.md"
    file.write_text(summary, encoding="utf-8")
    inputs = {"SUMMARY": str(file), "TOKEN": "secret", "COMMENT": "true", "ARTIFACT": "reports"}
    return job.run("comment", inputs | more)


@pytest.mark.parametrize("others", [0, 1, 100, 250])
def test_a_comment_is_written_once_and_then_updated(
    commenting: Job, github: GitHub, others: int
) -> None:
    """Other comments fill the first pages of GitHub's list."""
    github.comments = [{"id": 1000 + i, "body": "other"} for i in range(others)]

    for summary in ("first verdict ✅", "second verdict"):
        step = comment(commenting, summary)
        assert (step.code, "::warning" in step.log) == (0, False), step.log
        assert summary in github.comments[-1]["body"]

    assert len(github.comments) == others + 1
    assert [call for call in github.calls if call != "GET"] == ["POST", "PATCH"]
    assert all(one["body"] == "other" for one in github.comments[:-1])


def test_each_artifact_has_a_comment_of_its_own(commenting: Job, github: GitHub) -> None:
    for artifact in ("reports", "reports-2", "reports", "--> x"):
        comment(commenting, artifact, ARTIFACT=artifact)

    assert [call for call in github.calls if call != "GET"] == ["POST", "POST", "PATCH", "POST"]
    assert all(one["body"].splitlines()[0].count("-->") == 1 for one in github.comments)


def test_a_quote_of_the_comment_is_not_updated(commenting: Job, github: GitHub) -> None:
    comment(commenting, "verdict")
    quote = "> " + github.comments.pop()["body"]
    github.comments = [{"id": 1, "body": quote}, {"id": 2, "body": None}]

    comment(commenting, "verdict")

    assert [one["body"] for one in github.comments[:2]] == [quote, None]
    assert len(github.comments) == 3


def test_a_token_that_can_only_read_is_a_warning(commenting: Job, github: GitHub) -> None:
    github.read_only = True

    step = comment(commenting, "verdict")

    assert (step.code, github.comments) == (0, [])
    assert step.log.count("::warning ") == 1 and "pull-requests: write" in step.log


@pytest.mark.parametrize("status", [401, 403, 404, 500, 502])
def test_an_error_of_github_is_a_warning(commenting: Job, github: GitHub, status: int) -> None:
    github.status = status

    step = comment(commenting, "verdict")

    assert step.code == 0
    assert step.log.count("::warning ") == 1 and str(status) in step.log


def test_a_server_that_is_away_is_a_warning(commenting: Job) -> None:
    commenting.environment["GITHUB_API_URL"] = "http://127.0.0.1:1"

    step = comment(commenting, "verdict")

    assert step.code == 0
    assert step.log.count("::warning ") == 1


def test_no_comment_is_written_unless_it_is_wanted(commenting: Job, github: GitHub) -> None:
    assert comment(commenting, "verdict", COMMENT="false").code == 0
    assert comment(commenting, "verdict", COMMENT="yes").code == 2
    pathlib.Path(commenting.environment["GITHUB_EVENT_PATH"]).write_text('{"ref": "main"}')
    assert comment(commenting, "verdict").code == 0
    assert github.calls == []
