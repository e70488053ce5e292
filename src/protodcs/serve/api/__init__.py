"""What callers meet: the door before Ray's proxy, the routes and what each takes, and the page that describes them."""
