# SPDX-License-Identifier: Apache-2.0
"""The launcher's part of an elastic group: who belongs to it, and which process takes the place of one that has died.

In: processes that join, leave, or fail. Out: generations, each with its members and its coordination service. A generation begins
when all its members have said that they are there.
"""
