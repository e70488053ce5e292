"""Frames of videos and folders, and the command that watches them."""

import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ports import free_port
from protodcs import Client
from protodcs.demo import DemoStream
from protodcs.errors import InputError
from protodcs.frames import read_frames

RATE = 10


def write_video(path, seconds):
    """Write a video of drawn objects, ten frames per second."""
    av = pytest.importorskip("av")
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=RATE)
        stream.width = stream.height = 96
        stream.bit_rate = 4_000_000
        for sample in DemoStream(RATE * seconds, unknown=0.3, seed=4):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(sample.image, format="rgb24")))
        container.mux(stream.encode())
    return path


class Unhurried(threading.Event):
    """An event whose waits end at once, so that a video is read as fast as possible."""

    def wait(self, timeout=None):
        return self.is_set()


@pytest.mark.parametrize(("rate", "expected"), [(10, 30), (5, 15), (1, 3)])
def test_a_video_gives_as_many_frames_as_its_length_and_the_rate_say(tmp_path, rate, expected):
    video = write_video(tmp_path / "video.mp4", 3)
    frames = list(read_frames(str(video), rate, Unhurried()))
    assert len(frames) == expected
    assert frames[0].name == "video.mp4@0.00"
    assert frames[0].image.startswith(b"\xff\xd8")


def test_a_folder_gives_its_images_once_and_then_new_ones(tmp_path):
    def save(name):
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / name)

    save("b.png")
    save("a.png")
    (tmp_path / "notes.txt").write_text("no image")
    stopped = Unhurried()
    frames = read_frames(str(tmp_path), 1000, stopped)
    assert [next(frames).name, next(frames).name] == ["a.png", "b.png"]
    save("0.png")
    assert next(frames).name == "0.png"
    stopped.set()
    assert list(frames) == []


def test_what_is_no_source_is_an_error(tmp_path):
    with pytest.raises(InputError, match="There is no file or folder"):
        read_frames(str(tmp_path / "nothing.mp4"), 1, threading.Event())
    pytest.importorskip("av")
    (tmp_path / "text.mp4").write_text("no video")
    with pytest.raises(InputError, match="is no video that can be read"):
        list(read_frames(str(tmp_path / "text.mp4"), 1, threading.Event()))


def test_watching_a_video_classifies_its_frames(tmp_path):
    video = write_video(tmp_path / "video.mp4", 2)
    command = [sys.executable, "-W", "ignore", "-m", "protodcs", "watch", str(video), "--classes", "demo"]
    command += ["--model", "demo", "--rate", "10", "--no-browser", "--port", str(free_port())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        service = process.stdout.readline().partition("/ui/")[0]
        assert process.stdout.readline() == "Ctrl-C stops it.\n"
        assert process.stdout.readline().startswith("The source has ended.")
        with Client(service) as client:
            assert client.stream("watch").status()["sequence"] == 20
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0


def test_watching_a_folder_goes_on_after_a_broken_image(tmp_path):
    pytest.importorskip("av")
    (tmp_path / "0.png").write_bytes(b"no image")
    Image.fromarray(DemoStream(1, unknown=0)[0].image).save(tmp_path / "1.png")
    command = [sys.executable, "-W", "ignore", "-m", "protodcs", "watch", str(tmp_path), "--classes", "demo"]
    command += ["--model", "demo", "--no-browser", "--port", str(free_port())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        service = process.stdout.readline().partition("/ui/")[0]
        with Client(service) as client:
            while client.streams() != ["watch"] or client.stream("watch").status()["sequence"] < 1:
                assert process.poll() is None
                time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert "0.png" in process.stderr.read()


@pytest.mark.long
def test_watching_a_camera_goes_on_after_the_camera_was_restarted(tmp_path):
    pytest.importorskip("av")
    if subprocess.run(["/usr/bin/python3", "-c", "import gi"], check=False, capture_output=True).returncode:
        pytest.skip("needs gir1.2-gst-rtsp-server-1.0, python3-gi and gstreamer1.0-plugins-good of Debian")
    for place, sample in enumerate(DemoStream(100, unknown=0.3, seed=2)):
        Image.fromarray(sample.image).save(tmp_path / f"{place:03d}.jpg", quality=90)
    port = free_port()

    @contextmanager
    def camera():
        script = str(Path(__file__).parent / "rtsp_camera.py")
        command = ["/usr/bin/python3", script, str(tmp_path), str(port)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={}) as process:
            try:
                assert process.stdout.readline() == "ready\n"
                yield
            finally:
                process.kill()

    command = [sys.executable, "-W", "ignore", "-m", "protodcs", "watch", f"rtsp://127.0.0.1:{port}/camera"]
    command += ["--classes", "demo", "--model", "demo", "--rate", "5", "--no-browser", "--port", str(free_port())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        service = process.stdout.readline().partition("/ui/")[0]
        with Client(service) as client:

            def wait_for(samples):
                while client.streams() != ["watch"] or client.stream("watch").status()["sequence"] < samples:
                    assert process.poll() is None
                    time.sleep(0.1)

            with camera():
                wait_for(20)
            seen = client.stream("watch").status()["sequence"]
            with camera():
                wait_for(seen + 20)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0
