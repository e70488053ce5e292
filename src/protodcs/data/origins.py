"""Where public datasets can be downloaded, with size and hash. `protodcs.download` uses it; nothing is downloaded here.

Hashes and sizes are those of the published files, as torchvision and the records on Zenodo list them.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Origin:
    """A published file with a dataset.

    Attributes:
        about: what the file contains.
        url: its official address.
        size: number of bytes.
        md5: hash of the file, as its publisher or torchvision lists it.
        path: what it becomes below the data folder: the folder in the archive, or the file itself.
    """

    about: str
    url: str
    size: int
    md5: str
    path: str

    @property
    def megabytes(self) -> str:
        """The size for messages, such as "170 MB"."""
        return f"{self.size / 1e6:,.0f} MB"


ORIGINS: dict[str, Origin] = {
    "cifar10-test": Origin(
        "CIFAR-10, python version",
        "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
        170_498_071,
        "c58f30108f718f92721af3b95e74349a",
        "cifar-10-batches-py",
    ),
    "cifar100-test": Origin(
        "CIFAR-100, python version",
        "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
        169_001_437,
        "eb9058c3a382ffc7106e4002c42a8d85",
        "cifar-100-python",
    ),
    "svhn-test": Origin(
        "SVHN, cropped digits, test split",
        "http://ufldl.stanford.edu/housenumbers/test_32x32.mat",
        64_275_384,
        "eb5a983be6a315427106f1b164d9cef3",
        "svhn/test_32x32.mat",
    ),
    "tiny-imagenet-val": Origin(
        "Tiny ImageNet, 200 classes",
        "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
        248_100_043,
        "90528d7ca1a48142e341f4ef8d21d0de",
        "tiny-imagenet-200",
    ),
    "dtd": Origin(
        "Describable Textures Dataset, release 1.0.1",
        "https://www.robots.ox.ac.uk/~vgg/data/dtd/download/dtd-r1.0.1.tar.gz",
        625_239_812,
        "fff73e5086ae6bdbea199a49dfb8a4c1",
        "dtd",
    ),
    "cifar10-c": Origin(
        "CIFAR-10-C, 19 corruptions",
        "https://zenodo.org/records/2535967/files/CIFAR-10-C.tar?download=1",
        2_918_471_680,
        "56bf5dcef84df0e2308c6dcbcbbd8499",
        "CIFAR-10-C",
    ),
    "cifar100-c": Origin(
        "CIFAR-100-C, 19 corruptions",
        "https://zenodo.org/records/3555552/files/CIFAR-100-C.tar?download=1",
        2_918_473_216,
        "11f0ed0f1191edbf9fa23466ae6021d3",
        "CIFAR-100-C",
    ),
}
