# SPDX-License-Identifier: Apache-2.0
"""Sources of batches: adapters from the datasets of several libraries to one reader whose position can be saved."""
