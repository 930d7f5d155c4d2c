"""The HTTP front end: routes, keys, bounded bodies, answers, the page."""
