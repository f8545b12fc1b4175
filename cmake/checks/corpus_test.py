# SPDX-License-Identifier: Apache-2.0
"""tools/corpus must see what changes: an answer, a verdict, a bundle; and keep answers that nobody
asked it to change.   usage: corpus_test.py JUDGE FOLDER
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import unittest

TREE = pathlib.Path(__file__).resolve().parents[2]
TOOL = TREE / "tools" / "corpus"
BIN, SCRATCH = pathlib.Path(sys.argv[1]).resolve().parent, pathlib.Path(sys.argv[2]).resolve()
PACK = "fsdp"
EQUAL, DIFFERS, USAGE, BAD_INPUT, NOT_RUN = range(5)

sys.dont_write_bytecode = True
sys.path.insert(0, str(TOOL))

import answers  # noqa: E402
import bundles  # noqa: E402


def write_program(path: pathlib.Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


class Corpus(unittest.TestCase):
    """A copy of one pack with its answers."""

    def setUp(self) -> None:
        shutil.rmtree(SCRATCH, ignore_errors=True)
        self.corpus, self.made = SCRATCH / "corpus", SCRATCH / "made"
        self.corpus.mkdir(parents=True)
        shutil.copy(TREE / "fixtures" / "corpus" / f"{PACK}.tar.xz", self.corpus)
        listing = answers.read_json(TREE / "fixtures" / "corpus" / "pairs.json")
        runs = listing["packs"][PACK]["runs"]
        self.write("pairs.json", {"packs": {PACK: {"runs": runs}}})
        shutil.copy(TREE / "fixtures" / "corpus" / "judge.json", self.corpus)
        self.runs = sorted(runs)
        self.faulty = next(r for r in self.runs if self.answer(r)["status"] == "diverges")

    def write(self, name: str, content: dict) -> None:
        (self.corpus / name).write_text(json.dumps(content))

    def recorded(self) -> dict:
        return answers.read_json(self.corpus / "judge.json")

    def answer(self, run: str) -> dict:
        return self.recorded()["answers"][f"{PACK}/{run}"]

    def corpus_tool(self, *words: str, bin: pathlib.Path = BIN) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, TOOL, *words, "--bin", bin, "--corpus", self.corpus]
            + ["--output-dir", SCRATCH / "out"],
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout + done.stderr

    def judge(self, *words: str, bin: pathlib.Path = BIN) -> tuple[int, str]:
        return self.corpus_tool("judge", "--only", f"{PACK}/*", *words, bin=bin)

    def change_answer(self, run: str, **fields: object) -> None:
        content = self.recorded()
        content["answers"][f"{PACK}/{run}"] |= fields
        self.write("judge.json", content)

    def repack(self, change) -> None:
        """Changes the pack's bundles."""
        folder = SCRATCH / "unpacked"
        self.judge()
        shutil.copytree(SCRATCH / "out" / "judge" / "packs" / PACK, folder)
        change(folder)
        bundles.write_pack(folder, self.corpus / f"{PACK}.tar.xz")

    def test_what_was_recorded_is_equal(self) -> None:
        code, text = self.judge()
        self.assertEqual(code, EQUAL, text)
        self.assertIn(f"{len(self.runs)} of {len(self.runs)} answers", text)

    def test_an_altered_answer_differs_in_its_field(self) -> None:
        for field, value in (("name", "other"), ("ranks", [7]), ("cause", "x"), ("call", 9)):
            self.setUp()
            self.change_answer(self.faulty, **{field: value})
            code, text = self.judge()
            self.assertEqual(code, DIFFERS, text)
            self.assertIn(f"{PACK}/{self.faulty}: {field} must be", text)

    def test_a_field_that_is_marked_unstable_is_left_out(self) -> None:
        content = self.recorded()
        content["answers"][f"{PACK}/{self.faulty}"]["ranks"] = [7]
        content["unstable"] = {f"{PACK}/{self.faulty}": ["ranks"]}
        self.write("judge.json", content)
        self.assertEqual(self.judge()[0], EQUAL)

    def test_a_judge_that_allows_more_differs(self) -> None:
        loose = SCRATCH / "loose"
        write_program(
            loose / "isoshard-judge", f'#!/bin/sh\nexec "{BIN}/isoshard-judge" "$@" --rtol 1e9\n'
        )
        code, text = self.judge(bin=loose)
        self.assertEqual(code, DIFFERS, text)
        self.assertIn(f"{PACK}/{self.faulty}: status must be 'diverges', got", text)

    def test_a_fault_that_is_no_more_in_the_bundle_differs(self) -> None:
        right = next(r for r in self.runs if self.answer(r)["status"] == "conforms")

        def mend(folder: pathlib.Path) -> None:
            shutil.rmtree(folder / self.faulty)
            shutil.copytree(folder / right, folder / self.faulty)

        self.repack(mend)
        code, text = self.judge()
        self.assertEqual(code, DIFFERS, text)
        self.assertIn(f"{PACK}/{self.faulty}: status must be 'diverges', got 'conforms'", text)

    def test_a_missing_bundle_or_pack_is_a_bad_file(self) -> None:
        self.repack(lambda folder: shutil.rmtree(folder / self.faulty))
        self.assertEqual(self.judge()[0], BAD_INPUT)
        (self.corpus / f"{PACK}.tar.xz").write_bytes(b"no archive")
        self.assertEqual(self.judge()[0], BAD_INPUT)
        (self.corpus / f"{PACK}.tar.xz").unlink()
        self.assertEqual(self.judge()[0], BAD_INPUT)

    def test_pairs_and_answers_must_match(self) -> None:
        content = self.recorded()
        content["answers"][f"{PACK}/gone"] = content["answers"].pop(f"{PACK}/{self.faulty}")
        self.write("judge.json", content)
        code, text = self.judge()
        self.assertEqual(code, DIFFERS, text)
        self.assertIn(f"{PACK}/gone: was recorded, and is not judged now", text)
        self.assertIn(f"{PACK}/{self.faulty}: was not recorded", text)

    def test_a_pattern_that_fits_nothing_is_wrong_usage(self) -> None:
        self.assertEqual(self.corpus_tool("judge", "--only", "no/such")[0], USAGE)

    def test_a_judge_that_is_not_there_or_dies_could_not_run(self) -> None:
        self.assertEqual(self.judge(bin=SCRATCH / "nowhere")[0], NOT_RUN)
        write_program(SCRATCH / "dying" / "isoshard-judge", "#!/bin/sh\nkill -SEGV $$\n")
        self.assertEqual(self.judge(bin=SCRATCH / "dying")[0], NOT_RUN)

    def test_recording_over_answers_needs_a_reason_that_is_kept(self) -> None:
        self.change_answer(self.faulty, name="other")
        before = (self.corpus / "judge.json").read_bytes()
        code, text = self.corpus_tool("record", "judge")
        self.assertEqual(code, USAGE, text)
        self.assertEqual((self.corpus / "judge.json").read_bytes(), before)

        code, text = self.corpus_tool("record", "judge", "--because", "the name was wrong")
        self.assertEqual(code, EQUAL, text)
        last = self.recorded()["recordings"][-1]
        self.assertEqual(last["because"], "the name was wrong")
        self.assertIn(f"{PACK}/{self.faulty}", last["ids"])
        self.assertEqual(self.judge()[0], EQUAL)


class Answers(unittest.TestCase):
    def test_a_sentence_is_a_template_with_numbers_and_names(self) -> None:
        fields = answers.cause_fields(
            "gradient of a.0.weight: scale 1.99987 = dp on fp32; the same for 3 of 15 (b.c); "
            "forward exact"
        )
        self.assertEqual(
            fields,
            {
                "cause": "scale # = dp on fp32",
                "cause.numbers": [2.0],
                "cause.at": "gradient of a.0.weight",
                "cause.forward": "exact",
            },
        )

    def test_a_sentence_that_became_an_id_keeps_its_numbers_by_name(self) -> None:
        recorded = answers.AnswerFile(
            SCRATCH, {"x": answers.cause_fields("loss: scale 3 = dp on rank 1")}
        )
        renamed = {"scale # = dp on rank #": {"id": "scale", "numbers": ["factor", None]}}
        now = answers.id_fields("cause", {"id": "scale", "numbers": {"factor": 3.0004}})
        self.assertEqual(recorded.differences({"x": now}, renamed, lambda _: True), [])
        for wrong in ({"id": "scale", "numbers": {"factor": 2}}, {"id": "offset"}):
            now = answers.id_fields("cause", wrong)
            self.assertNotEqual(recorded.differences({"x": now}, renamed, lambda _: True), [])

    def test_what_differs_between_recordings_becomes_unstable(self) -> None:
        recorded = answers.AnswerFile(SCRATCH)
        recorded.record([{"x": {"a": 1, "b": 1}}, {"x": {"a": 1, "b": 2}}, {}], None)
        self.assertEqual(recorded.unstable, {"x": ["b"]})


class Edits(unittest.TestCase):
    def test_one_that_changes_nothing_is_refused(self) -> None:
        (SCRATCH / "bundle").mkdir(parents=True, exist_ok=True)
        with self.assertRaises(answers.CorpusError):
            bundles.edited(SCRATCH / "bundle", [{"files": {"remove": "no_such"}}], "x")


FAKE = """#!/usr/bin/env python3
import json, pathlib, sys
if sys.argv[1] == "list":
    print("A  missing\\n  some_fault    ddp nd\\n    words\\nB  scale\\n  other_fault   ddp")
    sys.exit(0)
folder = pathlib.Path(sys.argv[sys.argv.index("--output-dir") + 1])
base = pathlib.Path(__file__).parent
with (base / "calls").open("a") as log:
    log.write(" ".join(sys.argv[1:-2]) + "\\n")
if (base / "broken").exists() and "run" in sys.argv:
    sys.exit(70)
status = (base / "status").read_text()
case = {"case": "a_case", "status": status, "strength": None, "reason": "r", "findings": []}
(folder / "report.json").write_text(json.dumps({"cases": [case]}))
"""


class Runs(unittest.TestCase):
    """`run`, with a stand-in for isoshard."""

    def setUp(self) -> None:
        shutil.rmtree(SCRATCH, ignore_errors=True)
        self.bin, self.corpus = SCRATCH / "bin", SCRATCH / "corpus"
        write_program(self.bin / "isoshard", FAKE)
        self.corpus.mkdir()
        (self.bin / "status").write_text("conforms")

    def run_tool(self, *words: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, TOOL, *words, "--bin", self.bin, "--corpus", self.corpus],
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout + done.stderr

    def run_parts(self, folder: str) -> tuple[int, str]:
        words = ["--only", "verify/*,faults/*", "--output-dir", str(SCRATCH / folder)]
        return self.run_tool("run", *words)

    def test_it_goes_on_and_compares(self) -> None:
        (self.bin / "broken").touch()
        self.assertEqual(self.run_parts("a")[0], NOT_RUN)
        (self.bin / "broken").unlink()
        code, text = self.run_parts("a")
        self.assertEqual(code, BAD_INPUT, text)  # nothing is recorded yet
        calls = (self.bin / "calls").read_text().splitlines()
        self.assertEqual(len(calls), 5, calls)  # 2 presets, 2 classes, and the one that broke down
        self.assertEqual(len(set(calls)), 4, calls)
        self.assertEqual(self.run_tool("record", "run", str(SCRATCH / "a"))[0], EQUAL)
        self.assertEqual(self.run_parts("a")[0], EQUAL)

        (self.bin / "status").write_text("vacuous")
        self.assertEqual(self.run_parts("a")[0], EQUAL)  # it was not run again
        code, text = self.run_parts("b")
        self.assertEqual(code, DIFFERS, text)
        self.assertIn("faults/A/a_case: status must be 'conforms', got 'vacuous'", text)
        self.assertEqual(self.run_tool("record", "run", str(SCRATCH / "b"))[0], USAGE)

    def test_a_folder_of_another_program_is_refused(self) -> None:
        self.run_parts("a")
        with (self.bin / "isoshard").open("a") as program:
            program.write("# another\n")
        self.assertEqual(self.run_parts("a")[0], USAGE)


if __name__ == "__main__":
    os.environ.pop("ISOSHARD_JOBS", None)
    unittest.main(argv=sys.argv[:1])
