{% if options.doctor %}

# The nodes are checked first.  HET_DOCTOR=0 goes without; HET_DOCTOR_ARGS adds options.
if [[ "${HET_DOCTOR:-1}" != 0 ]]; then
    {{ check }} || exit $?
fi
{% endif %}
