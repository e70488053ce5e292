"""An RTSP camera that repeats the JPEG files of a folder: GStreamer's server, run with the system's Python."""

import sys


def main(folder: str, port: str) -> None:
    import gi

    gi.require_version("Gst", "1.0")
    gi.require_version("GstRtspServer", "1.0")
    from gi.repository import GLib, Gst, GstRtspServer

    Gst.init(None)
    server = GstRtspServer.RTSPServer()
    server.set_service(port)
    factory = GstRtspServer.RTSPMediaFactory()
    factory.set_shared(True)
    source = f'multifilesrc location={folder}/%03d.jpg loop=true caps="image/jpeg,framerate=10/1"'
    factory.set_launch(f"( {source} ! jpegdec ! videoconvert ! jpegenc ! rtpjpegpay name=pay0 pt=26 )")
    server.get_mount_points().add_factory("/camera", factory)
    server.attach(None)
    print("ready", flush=True)
    GLib.MainLoop().run()


if __name__ == "__main__":
    main(*sys.argv[1:])
