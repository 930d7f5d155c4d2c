"""What needs Ray: one cluster for the whole run, with apps as users deploy them."""
