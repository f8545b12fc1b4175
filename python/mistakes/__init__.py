# SPDX-License-Identifier: Apache-2.0
"""Three ordinary training loops with the mistakes of their users, and what the judge says of each.

python -m mistakes --output-dir runs/mistakes --loop nanogpt
"""
