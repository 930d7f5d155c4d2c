"""The Helm chart's values: their one description, from which schema, defaults and table are written."""
