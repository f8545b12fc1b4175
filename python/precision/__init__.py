# SPDX-License-Identifier: Apache-2.0
"""Makes the tables of docs/internals/precision-measured.md.

They show the verdicts in both precisions on scripts, scale errors and bugs.

python -m precision examples --output-dir runs/precision
"""
