# SPDX-License-Identifier: Apache-2.0
"""A generated matrix of right training runs of many frameworks, each judged by isoshard.check.

python -m matrix --output-dir runs/matrix --framework 'hf_tp'
"""
