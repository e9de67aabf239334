"""Train on text of many lengths under the plans of a few: stalls, memory, captures and losses."""
