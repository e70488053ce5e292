"""The PostgreSQL that tests start: what they do to it happens."""

import psycopg
import pytest

from service.postgres import PostgresServer


def test_a_standby_has_every_acknowledged_commit_after_the_primary_was_killed():
    with PostgresServer() as primary:
        primary.sql("CREATE TABLE numbers (number int)")
        with primary.standby() as standby:
            for number in range(20):
                primary.sql(f"INSERT INTO numbers VALUES ({number})")
            primary.kill()
            with pytest.raises(psycopg.OperationalError):
                primary.sql("SELECT 1")
            standby.promote()
            assert standby.sql("SELECT count(*) FROM numbers") == [(20,)]
            standby.sql("INSERT INTO numbers VALUES (20)")


def test_a_killed_server_starts_again_and_a_paused_one_goes_on():
    with PostgresServer() as server:
        url = server.database()
        server.sql("CREATE TABLE numbers (number int)", url)
        server.kill()
        server.start()
        assert server.sql("SELECT count(*) FROM numbers", url) == [(0,)]
        server.pause()
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(f"{url}?connect_timeout=2")
        server.resume()
        assert server.sql("SELECT 1", url) == [(1,)]
        server.stop()
