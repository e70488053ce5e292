# Check the append-only files of a stopped Redis, and cut off the end of a write that a crash interrupted.
#
# Usage: perl repair_aof.pl FOLDER        (the folder with the manifest, usually /data/appendonlydir)
#
# The script cuts only if all of this is true:
# - The damage is in the newest incremental file.
# - The file ends in the middle of a command, or inside a transaction whose EXEC is missing.
# - Everything up to that end is valid.
# So it removes at most one transaction, or one command outside of a transaction. With `appendfsync always` Redis replies
# after the EXEC is on the disk, so no client got a reply for it. The removed bytes stay in a copy beside the file.
# For any other damage, the script changes nothing and exits with status 1. Files are read in blocks of 1 MiB.
use strict;
use warnings;
use Errno qw(EEXIST);
use Fcntl qw(O_CREAT O_EXCL O_WRONLY SEEK_SET);
use IO::Handle;

use constant BLOCK   => 1 << 20;
use constant OVERLAP => 64;    # More bytes than a match in find_hidden_command() has.

my $number = qr/0|[1-9][0-9]{0,9}/;

# Return the names in a folder, or nothing if it cannot be read.
sub list {
    my ($folder) = @_;
    opendir(my $handle, $folder) or return;
    return sort readdir $handle;
}

sub refuse {
    my ($problem, $fix) = @_;
    print STDERR "repair_aof.pl: $problem. $fix Redis was not started, and no file was changed.\n";
    exit 1;
}

# A reader of one file. `buffer` holds the bytes of the file from `start` on, `at` is the next one to read.
sub open_reader {
    my ($path) = @_;
    open(my $file, '<:raw', $path) or refuse("Cannot read $path: $!", 'Restore the file or its permissions.');
    return { path => $path, file => $file, buffer => '', start => 0, at => 0 };
}

sub position { my ($reader) = @_; return $reader->{start} + $reader->{at}; }

# Buffer at least `count` bytes if the file has so many. Return how many are there.
sub fill {
    my ($reader, $count) = @_;
    my $there = length($reader->{buffer}) - $reader->{at};
    return $there if $there >= $count;
    $reader->{start} += $reader->{at};
    $reader->{buffer} = substr($reader->{buffer}, $reader->{at});
    $reader->{at}     = 0;
    while (length($reader->{buffer}) < $count) {
        my $read = read($reader->{file}, $reader->{buffer}, BLOCK, length $reader->{buffer});
        defined $read or refuse("Cannot read $reader->{path}: $!", 'Check the disk.');
        last if $read == 0;
    }
    return length $reader->{buffer};
}

# These end check_commands(). A torn file stops too early, an invalid one has bytes that no Redis writes.
sub torn { die { torn => 1 }; }
sub invalid { my ($problem) = @_; die { problem => $problem }; }

# Read a line such as *3 or $12 and return its number.
sub read_count {
    my ($reader, $sign) = @_;
    my $there = fill($reader, 16);
    my $bytes = substr($reader->{buffer}, $reader->{at}, 16);
    if ($bytes =~ /^\Q$sign\E($number)\r\n/) {
        $reader->{at} += $+[0];
        return $1;
    }
    torn() if $there < 16 && $bytes =~ /^(?:\Q$sign\E(?:$number\r?)?)?\z/;
    invalid("expected a line such as ${sign}3 at offset " . position($reader));
}

# Read one argument and return its first bytes: enough to recognize MULTI and EXEC.
sub read_argument {
    my ($reader) = @_;
    my $left  = read_count($reader, '$');
    my $there = fill($reader, $left < BLOCK ? $left + 2 : BLOCK);
    my $first = substr($reader->{buffer}, $reader->{at}, $left < 8 ? $left : 8);
    while ($left > $there) {
        torn() if $there == 0;
        $reader->{at} += $there;
        $left -= $there;
        $there = fill($reader, $left < BLOCK ? $left + 2 : BLOCK);
    }
    $reader->{at} += $left;
    fill($reader, 2);
    my $end = substr($reader->{buffer}, $reader->{at}, 2);
    torn() if $end eq '' || $end eq "\r";
    invalid('expected the end of an argument at offset ' . position($reader)) if $end ne "\r\n";
    $reader->{at} += 2;
    return $first;
}

# Read a command that is complete in the buffer, several times faster than read_argument() does.
# Return the number of its arguments and its name. If it is incomplete or invalid, read and return nothing.
sub read_buffered_command {
    my ($reader) = @_;
    my $buffer = \$reader->{buffer};
    my ($at, $left, $arguments, $name) = ($reader->{at}, 0);
    do {
        my $end = index($$buffer, "\r\n", $at);
        my $line = $end < 0 ? '' : substr($$buffer, $at, $end - $at);
        $at = $end + 2;
        if (!defined $arguments) {
            $line =~ /^\*($number)\z/ or return;
            $arguments = $left = $1;
        }
        else {
            $line =~ /^\$($number)\z/ or return;
            return if $at + $1 + 2 > length $$buffer || substr($$buffer, $at + $1, 2) ne "\r\n";
            $name = substr($$buffer, $at, $1 < 8 ? $1 : 8) if !defined $name;
            $at += $1 + 2;
            $left--;
        }
    } while ($left > 0);
    return if !defined $name;
    $reader->{at} = $at;
    return ($arguments, $name);
}

# Read a command of any size. Return the number of its arguments and its name.
sub read_command {
    my ($reader) = @_;
    my $start = position($reader);
    my $arguments = read_count($reader, '*');
    invalid("a command without a name at offset $start") if $arguments == 0;
    my $name = read_argument($reader);
    read_argument($reader) for 2 .. $arguments;
    return ($arguments, $name);
}

# Read a line such as #TS:1628217470, which Redis writes if aof-timestamp-enabled is set.
sub read_timestamp {
    my ($reader) = @_;
    my $there = fill($reader, 32);
    my $bytes = substr($reader->{buffer}, $reader->{at}, 32);
    if ($bytes =~ /^#TS:[0-9]+\r\n/) {
        $reader->{at} += $+[0];
        return;
    }
    torn() if $there < 32 && $bytes =~ /^#(?:T(?:S(?::(?:[0-9]+\r?)?)?)?)?\z/;
    invalid('expected a timestamp at offset ' . position($reader));
}

# Read a file to its end. Return what is wrong with it, or nothing:
#   good: the offset behind the last complete command or transaction
#   starts: where the commands behind `good` begin, as the keys of a hash
#   problem: why the file must not be cut; missing if the end is torn
sub check_commands {
    my ($reader) = @_;
    my ($good, %starts, $in_transaction, $one_word) = (0);
    my $finished = eval {
        while (fill($reader, 1)) {
            if (substr($reader->{buffer}, $reader->{at}, 1) eq '#') {
                read_timestamp($reader);
            }
            else {
                my $start = position($reader);
                $starts{$start} = 1;
                my ($arguments, $name) = read_buffered_command($reader);
                ($arguments, $name) = read_command($reader) if !defined $arguments;
                $name = uc $name;
                if ($arguments == 1 && $name eq 'MULTI') {
                    invalid("a second MULTI inside a transaction at offset $start") if $in_transaction;
                    $in_transaction = 1;
                }
                elsif ($arguments == 1 && $name eq 'EXEC') {
                    invalid("an EXEC without a MULTI at offset $start") if !$in_transaction;
                    ($in_transaction, $one_word) = ();
                }
                elsif ($arguments == 1 && $in_transaction) {
                    $one_word = "a command of one word, perhaps a damaged EXEC, at offset $start";
                }
            }
            if (!$in_transaction) {
                $good   = position($reader);
                %starts = ();
            }
        }
        torn() if $in_transaction;
        1;
    };
    return if $finished;
    die $@ if !ref $@;
    my $problem = $@->{problem};
    $problem = $one_word if !defined $problem && defined $one_word;
    return { good => $good, starts => \%starts, problem => $problem };
}

# Return a problem if an argument behind `good` seems to contain commands. Then its length is damaged, and the bytes
# that seem to belong to one command may be many, acknowledged ones. Such text in the argument of a torn command
# looks the same. It is refused too.
sub find_hidden_command {
    my ($path, $torn) = @_;
    my $reader = open_reader($path);
    seek($reader->{file}, $torn->{good}, SEEK_SET) or refuse("Cannot read $path: $!", 'Check the disk.');
    $reader->{start} = $torn->{good};
    while (fill($reader, BLOCK)) {
        my $buffer = $reader->{buffer};
        return 'an EXEC at offset ' . ($reader->{start} + $-[0]) if $buffer =~ /\r\nEXEC\r\n/i;
        while ($buffer =~ /\n(\*$number\r\n\$$number\r\n)/g) {
            my $start = $reader->{start} + $-[1];
            return "a command inside an argument at offset $start" if !$torn->{starts}{$start};
        }
        last if length($buffer) < BLOCK;
        # Keep some bytes: what is looked for may continue in the next block.
        $reader->{at} = length($buffer) - OVERLAP;
    }
    return;
}

# Return the files that the manifest lists, in the order in which Redis loads them.
sub read_manifest {
    my ($folder, $manifest) = @_;
    my (@base, @incremental);
    open(my $lines, '<:raw', $manifest) or refuse("Cannot read $manifest: $!", 'Restore the file or its permissions.');
    while (my $line = <$lines>) {
        next if $line =~ /^#/;
        $line =~ m{^file ([^/\s"]+) seq [0-9]+ type ([bih])(?: [^\n]*)?\n\z}
            or refuse("Line $. of $manifest is damaged: " . substr($line, 0, 100), 'Restore the folder from a backup.');
        push @base, "$folder/$1" if $2 eq 'b';
        push @incremental, "$folder/$1" if $2 eq 'i';
    }
    @base + @incremental or refuse("$manifest lists no file", 'Restore the folder from a backup.');
    return (\@base, \@incremental);
}

sub is_rdb {
    my ($path) = @_;
    my $reader = open_reader($path);
    fill($reader, 5);
    return $path =~ /\.rdb\z/ || substr($reader->{buffer}, 0, 5) eq 'REDIS';
}

# Refuse a damaged RDB file. Redis itself would accept an empty one and start without the data.
sub check_rdb {
    my ($path) = @_;
    my $fix = 'Restore the folder from a backup.';
    refuse("$path is empty", $fix) if !-s $path;
    open(my $output, '-|', 'redis-check-aof', $path) or refuse("Cannot run redis-check-aof: $!", 'Install it.');
    my @lines = <$output>;
    return if close $output;
    print STDERR @lines;
    refuse("$path is damaged", $fix);
}

# Refuse to cut a file that a process still writes: its end may only seem torn.
sub check_unused {
    my ($path) = @_;
    my ($device, $inode) = stat $path;
    for my $process (grep { /^[0-9]+\z/ && $_ != $$ } list('/proc')) {
        for my $descriptor (list("/proc/$process/fd")) {
            my ($other_device, $other_inode) = stat "/proc/$process/fd/$descriptor";
            next if !defined $other_inode || $other_inode != $inode || $other_device != $device;
            refuse("Process $process has $path open", 'Stop that process first.');
        }
    }
}

sub sync_path {
    my ($path) = @_;
    open(my $handle, '<', $path) or die "Cannot open $path: $!\n";
    $handle->sync or die "Cannot fsync $path: $!\n";
}

# Copy everything behind `good` to a new file and return its name.
sub copy_tail {
    my ($path, $good) = @_;
    my ($name, $try, $copy) = ("$path.cut-$good", 1);
    until (sysopen($copy, $name, O_CREAT | O_EXCL | O_WRONLY, 0600)) {
        $! == EEXIST or die "Cannot create $name: $!\n";
        $name = "$path.cut-$good." . ++$try;
    }
    open(my $source, '<:raw', $path) or die "Cannot read $path: $!\n";
    seek($source, $good, SEEK_SET) or die "Cannot read $path: $!\n";
    my $complete = eval {
        while (1) {
            my $read = read($source, my $block, BLOCK);
            defined $read or die "Cannot read $path: $!\n";
            last if $read == 0;
            print {$copy} $block or die "Cannot write $name: $!\n";
        }
        $copy->flush && $copy->sync && close $copy or die "Cannot write $name: $!\n";
    };
    return $name if $complete;
    my $error = $@;
    unlink $name;
    die $error;
}

sub cut {
    my ($folder, $path, $good) = @_;
    my $bytes = (-s $path) - $good;
    my $copy = eval { my $name = copy_tail($path, $good); sync_path($folder); $name };
    chomp(my $error = $@);
    defined $copy or refuse("Cannot copy the torn end of $path: $error", 'Free disk space or correct the permissions.');
    open(my $file, '+<:raw', $path) or die "Cannot cut $path: $!\n";
    truncate($file, $good) && $file->sync or die "Cannot cut $path: $!\n";
    print STDERR "repair_aof.pl: The last write to $path was interrupted. Removed $bytes bytes behind offset $good. "
        . "They are in $copy.\n";
}

# Without its manifest Redis ignores the files and starts empty. A crash during the very first start leaves no commands.
sub check_without_manifest {
    my ($folder) = @_;
    my ($found) = grep { /\.incr\.aof\z/ && -s "$folder/$_" } list($folder);
    refuse("$folder has the file $found but no manifest", 'Restore the folder from a backup.') if defined $found;
}

sub main {
    my ($folder) = @_;
    return if !-e $folder;
    my @manifests = grep { /\.manifest\z/ && !/^temp-/ } list($folder);
    return check_without_manifest($folder) if !@manifests;
    @manifests == 1 or refuse("$folder has several manifests: @manifests", 'Remove those that Redis does not use.');
    my ($base, $incremental) = read_manifest($folder, "$folder/$manifests[0]");
    my $newest = @$incremental ? $incremental->[-1] : '';
    my $to_cut;
    check_rdb($_) for grep { is_rdb($_) } @$base;
    for my $path ((grep { !is_rdb($_) } @$base), @$incremental) {
        my $damage = check_commands(open_reader($path)) or next;
        my $good = $damage->{good};
        my $problem = $damage->{problem};
        $problem = 'its end is missing, and only the newest incremental file may be cut' if $path ne $newest;
        $problem = find_hidden_command($path, $damage) if !defined $problem;
        if (defined $problem) {
            my $lost = (-s $path) - $good;
            refuse("$path is damaged behind offset $good: $problem",
                "Restore the folder from a backup. Cutting the file there would remove $lost bytes.");
        }
        $to_cut = $good;
    }
    if (defined $to_cut) {
        check_unused($newest);
        cut($folder, $newest, $to_cut);
    }
}

@ARGV == 1 or die "Usage: perl repair_aof.pl FOLDER\n";
main(@ARGV);
