# SPDX-License-Identifier: Apache-2.0
"""Tables of docs/precision-measured.md: what both precisions say of scripts, scale errors and bugs.

python -m precision examples --output-dir runs/precision
"""
