redis.call('DEL', meta, log)
return reply('OK')
