"""The HTTP API: routes, the bodies they accept, and the page that describes them."""
