# SPDX-License-Identifier: Apache-2.0
"""Three ordinary training loops with the mistakes of their users, and what the judge says of each.

python -m mistakes --output-dir runs/mistakes --loop nanogpt

table.py says what is wrong with each, and which record a person calls the first wrong one.
first_run.jsonl has the verdicts of the first run, before anything was changed for these mistakes.
Its key cause_is has what a person said of the cause in the verdict: right, vague (true, but it does
not name the mistake), wrong or none.
"""
