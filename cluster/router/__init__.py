"""The router: remembers every live request, chooses its replica, and sees it through whatever that becomes."""
