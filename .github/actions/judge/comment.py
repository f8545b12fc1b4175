# SPDX-License-Identifier: Apache-2.0
"""Writes the summary into one comment of the pull request, and updates it in later runs.

Environment: INPUT_SUMMARY is the Markdown file, INPUT_TOKEN the token, INPUT_COMMENT true or false.
INPUT_ARTIFACT is part of a hidden marker by which the comment is found, so that each use of the
action in a workflow has its own.
Exit code: 0, also if GitHub rejects the comment, which is a warning; 2 for a wrong INPUT_COMMENT.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import workflow

_PER_PAGE = 100
_TIMEOUT = 60
_REJECTED = (401, 403, 404)


def main() -> int:
    """Writes the comment if there is a pull request, and returns the exit code of the step."""
    wanted = os.environ.get("INPUT_COMMENT", "true")
    if wanted not in ("true", "false"):
        workflow.annotate("error", f"The input comment must be true or false, got {wanted!r}.")
        return workflow.USAGE
    pull_request = _pull_request()
    if wanted == "false" or pull_request is None:
        print("no comment: " + ("not wanted" if wanted == "false" else "no pull request"))
        return workflow.OK
    try:
        _write(pull_request)
    except urllib.error.HTTPError as error:
        text = f"No comment was written: GitHub answered {error.code} ({error.reason})."
        if error.code in _REJECTED:
            text += (
                " The job must have the permission pull-requests: write. The token of a pull "
                "request from a fork can only read; the page of the job has the summary."
            )
        workflow.annotate("warning", text)
    except OSError as error:  # urllib.error.URLError is one
        workflow.annotate("warning", f"No comment was written: GitHub cannot be reached ({error}).")
    return workflow.OK


def _pull_request() -> dict[str, Any] | None:
    """The pull request that started the workflow, as the event describes it."""
    event = os.environ.get("GITHUB_EVENT_PATH")
    if not event:
        return None
    data: dict[str, Any] = json.loads(Path(event).read_text(encoding="utf-8"))
    return data.get("pull_request")


def _write(pull_request: dict[str, Any]) -> None:
    number, commit = pull_request["number"], pull_request["head"]["sha"]
    repository = f"/repos/{os.environ['GITHUB_REPOSITORY']}/issues"
    marker = f"<!-- isoshard judge {urllib.parse.quote(os.environ.get('INPUT_ARTIFACT', ''))} -->"
    summary = Path(os.environ["INPUT_SUMMARY"]).read_text(encoding="utf-8")
    body = {"body": f"{marker}\n{summary}\n{_source(commit)}\n"}
    for comment in _comments(f"{repository}/{number}/comments"):
        if (comment.get("body") or "").startswith(marker):
            _request("PATCH", f"{repository}/comments/{comment['id']}", body)
            return
    _request("POST", f"{repository}/{number}/comments", body)


def _source(commit: str) -> str:
    """A line that leads to the run, and names the commit."""
    run = "/".join(os.environ.get(name, "") for name in ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY"))
    run += f"/actions/runs/{os.environ.get('GITHUB_RUN_ID', '')}"
    return f"[Log and reports]({run}) of commit {commit[:12]}."


def _comments(path: str) -> Iterator[dict[str, Any]]:
    page = 1
    while True:
        comments = _request("GET", f"{path}?per_page={_PER_PAGE}&page={page}")
        yield from comments
        if len(comments) < _PER_PAGE:
            return
        page += 1


def _request(method: str, path: str, body: dict[str, str] | None = None) -> Any:
    request = urllib.request.Request(
        os.environ.get("GITHUB_API_URL", "https://api.github.com") + path,
        data=None if body is None else json.dumps(body).encode(),
        method=method,
        headers={
            "Accept": "application/vnd.github+json",
            "Authorization": f"Bearer {os.environ.get('INPUT_TOKEN', '')}",
            "Content-Type": "application/json",
            "X-GitHub-Api-Version": "2022-11-28",
        },
    )
    with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
        return json.loads(answer.read())


if __name__ == "__main__":
    sys.exit(main())
