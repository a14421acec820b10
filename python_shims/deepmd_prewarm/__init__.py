# SPDX-License-Identifier: LGPL-3.0-or-later
"""Compile every task before step 1, free what compiling needed."""
