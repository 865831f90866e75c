await() {  # the exit code of a process; a signal that is trapped ends a 'wait' before the process has ended
    local rc=143 last
    while ((rc > 128)) && kill -0 "$1" 2>/dev/null; do
        rc=0
        wait "$1" || rc=$?
    done
    if ((rc > 128)); then  # it has ended between two looks; 127: it was waited for, and a signal has ended it
        last=0
        wait "$1" 2>/dev/null || last=$?
        ((last == 127)) || rc=$last
    fi
    return "$rc"
}
