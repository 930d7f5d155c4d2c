"""Ray: router, replica, placement, the OpenAI front end, health and metrics."""
