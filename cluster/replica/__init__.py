"""The replica: one tensor-parallel group, the thread that owns its engine, and the links of its routers."""
